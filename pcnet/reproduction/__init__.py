"""The numerical study of *Online Generalised Predictive Coding*, run again: `reproduce(folder)`."""

from pcnet.reproduction.conduct import Reproduction, conclude, reproduce

__all__ = ["Reproduction", "conclude", "reproduce"]
