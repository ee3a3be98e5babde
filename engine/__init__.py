"""What decodes: models, weights, text, decoding, drafting and meters. Never imports the interface."""
