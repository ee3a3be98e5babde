"""Things that run a model: the reference in torch, the native CPU decoder, the CUDA megakernel."""
