"""What leaves a silo: secure sums, homomorphic encryption, and differential privacy with its ledger.

`metis.core.secure_sum` describes the messages and their order, `metis.core.ring` the numbers. A learner has a `Member`
(`member.py`) and a controller an `Opener` (`opener.py`) for each context; neither sends anything itself. The protocol
recombines published parts (Bonawitz et al. 2017, Flamingo 2023) and has not been reviewed by anybody outside.

`records.py` has the settings of differential privacy at a site, `accounting.py` what steps cost.
"""
