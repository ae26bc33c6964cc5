"""Study of the adaptive filter on systems of many kinds, beside Kalman filters that are told the noise."""
