"""Whether beliefs are right, and as sure as they should be: pcnet's rules beside the paper's and Kalman filters."""

from studies.calibration.conduct import Calibration, calibrate, conclude

__all__ = ["Calibration", "calibrate", "conclude"]
