"""The KV cache: pages by modality, slot pools, block tables, and the transformers Cache that
uses them."""
