"""Calibration study: errors and coverage of pcnet's beliefs beside the paper's rules and Kalman filters."""

from studies.calibration.run import Calibration, calibrate, conclude

__all__ = ["Calibration", "calibrate", "conclude"]
