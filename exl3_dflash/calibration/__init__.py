"""Calibration: token rows, target taps, sampled anchors, and one Hessian per linear input of the drafter."""
