"""Programs that run in virtual time: training, dry runs, calibration, scaling studies."""
