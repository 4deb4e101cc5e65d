"""Page formats: each has a class, which is selected by the policy's key_axis."""
