"""The method as tensor math: rotation, balancing, token scaling, fits, page bytes and back."""
