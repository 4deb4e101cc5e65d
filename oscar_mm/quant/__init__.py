"""The method as plain tensor maths: rotation, balancing, token scaling, fits, bit packing."""
