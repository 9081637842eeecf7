"""WHEN to mix and WHO trains next: one question, answered after every event."""

from metis.core.protocols.asynchronous import Asynchronous
from metis.core.protocols.protocol import CommunicationProtocol, Paced
from metis.core.protocols.semi_synchronous import SemiSynchronous
from metis.core.protocols.synchronous import Synchronous

__all__ = ["Asynchronous", "CommunicationProtocol", "Paced", "SemiSynchronous", "Synchronous"]
