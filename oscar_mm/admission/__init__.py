"""Admission: checks of request sizes against the context, the KV budget and GPU memory."""
