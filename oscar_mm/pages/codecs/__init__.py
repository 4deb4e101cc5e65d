"""Page formats: one class per format, which the policy's key_axis selects."""
