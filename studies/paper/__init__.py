"""The numerical study of *Online Generalised Predictive Coding*, run again: `reproduce(folder)`."""

from studies.paper.conduct import Reproduction, conclude, reproduce

__all__ = ["Reproduction", "conclude", "reproduce"]
