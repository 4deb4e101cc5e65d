"""Page formats: one class each, found by the policy's key_axis."""
