"""The cache: pages by modality, pools, streams, and the transformers Cache over them."""
