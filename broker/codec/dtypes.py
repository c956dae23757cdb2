"""The dtypes that can travel, by their codes on the wire. A code is never reused and never renumbered."""

import torch

DTYPES: dict[int, torch.dtype] = {
    1: torch.bool,
    2: torch.uint8,
    3: torch.int8,
    4: torch.uint16,
    5: torch.int16,
    6: torch.uint32,
    7: torch.int32,
    8: torch.uint64,
    9: torch.int64,
    10: torch.float16,
    11: torch.bfloat16,
    12: torch.float32,
    13: torch.float64,
    14: torch.complex32,
    15: torch.complex64,
    16: torch.complex128,
    17: torch.float8_e4m3fn,
    18: torch.float8_e4m3fnuz,
    19: torch.float8_e5m2,
    20: torch.float8_e5m2fnuz,
    21: torch.float8_e8m0fnu,
    22: torch.float4_e2m1fn_x2,
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
