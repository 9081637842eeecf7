"""Seconds of NVFlare's homomorphic encryption: one layer of so many numbers, as its filters and aggregator treat it."""

from __future__ import annotations

import time

import numpy as np
import tenseal
from nvflare.lighter.impl.he import HEBuilder
from simple import answer, spec

asked, builder = spec(), HEBuilder()
context = tenseal.context(
    tenseal.SCHEME_TYPE.CKKS,
    poly_modulus_degree=builder.poly_modulus_degree,
    coeff_mod_bit_sizes=builder.coeff_mod_bit_sizes,
    encryption_type=tenseal.ENCRYPTION_TYPE.SYMMETRIC,
)
context.global_scale = 2**builder.scale_bits
values = np.random.default_rng(7).standard_normal(asked["numbers"], np.float32)


def seconds(work):
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def encrypt():
    return tenseal.ckks_vector(context, values * np.float64(10)).serialize()  # as its ModelEncryptor does


encrypted_in, sent = seconds(encrypt)
theirs = tenseal.ckks_vector_from(context, sent)
added_in, total = seconds(lambda: tenseal.ckks_vector_from(context, sent) + theirs)
decrypted_in, opened = seconds(total.decrypt)
assert np.abs(np.array(opened)[: values.size] / 20 - values).max() < 1e-3
answer({"encrypt": encrypted_in, "add": added_in, "decrypt": decrypted_in, "upload": len(sent) / values.nbytes})
