"""Weights in the forms of other programs: one safetensors file, transformers, torch.distributed.checkpoint, ONNX.

May import `checkpoint`, `runs`, `disk`, and `pipeline`. Read `stored_weights.py`, then `export.py`.
"""
