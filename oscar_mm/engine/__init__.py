"""Engine: prefill, continuous batching, sampling and detokenization of requests."""
