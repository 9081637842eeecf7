"""WHEN to mix and WHO trains next."""

from metis.core.protocols.asynchronous import Asynchronous
from metis.core.protocols.barrier import Barrier
from metis.core.protocols.protocol import BaseProtocol, CommunicationProtocol
from metis.core.protocols.semi_synchronous import SemiSynchronous
from metis.core.protocols.synchronous import Synchronous

__all__ = ["Asynchronous", "Barrier", "BaseProtocol", "CommunicationProtocol", "SemiSynchronous", "Synchronous"]
