"""Numerical studies, each run as a program: `python -m studies.paper`, `python -m studies.calibration`."""
