"""Whether beliefs are right, and as sure as they should be: pcnet's rules beside the paper's and Kalman filters."""

from pcnet.calibration.conduct import Calibration, calibrate, conclude

__all__ = ["Calibration", "calibrate", "conclude"]
