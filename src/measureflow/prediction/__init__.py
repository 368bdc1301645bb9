"""What a measure predicts: mixtures, quantiles, scores, calibration, plots."""
