"""Reproduction of the numerical study of *Online Generalised Predictive Coding*: `reproduce(folder)`."""

from studies.paper.run import Reproduction, conclude, reproduce

__all__ = ["Reproduction", "conclude", "reproduce"]
