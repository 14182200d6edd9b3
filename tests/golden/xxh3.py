# SPDX-License-Identifier: MIT
"""XXH3 of 64 bits with the default secret and a seed, of 9 bytes and more, after the specification in xxHash's doc/xxhash_spec.md."""
from __future__ import annotations

import struct

MASK = (1 << 64) - 1
PRIME32_1, PRIME32_2, PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIME64_1, PRIME64_2, PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
PRIME64_4, PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
PRIME_MX1 = 0x165667919E3779F9
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8"
    "fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb17"
    "0ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e")
STRIPE_BYTES = 64
STRIPES_IN_BLOCK = (len(SECRET) - STRIPE_BYTES) // 8
BLOCK_BYTES = STRIPES_IN_BLOCK * STRIPE_BYTES


def u64(data: bytes, at: int) -> int:
    return int.from_bytes(data[at:at + 8], "little")


def swapped(value: int, count: int) -> int:
    return int.from_bytes(value.to_bytes(count, "little"), "big")


def folded(a: int, b: int) -> int:
    product = a * b
    return (product ^ product >> 64) & MASK


def avalanche(value: int) -> int:
    value ^= value >> 37
    value = value * PRIME_MX1 & MASK
    return value ^ value >> 32


def mixed(data: bytes, at: int, secret_at: int, seed: int) -> int:
    """16 bytes of the data with 16 of the secret."""
    return folded(u64(data, at) ^ (u64(SECRET, secret_at) + seed & MASK),
                  u64(data, at + 8) ^ (u64(SECRET, secret_at + 8) - seed & MASK))


def of_9_to_16_bytes(data: bytes, seed: int) -> int:
    length = len(data)
    low = (u64(SECRET, 24) ^ u64(SECRET, 32)) + seed & MASK ^ u64(data, 0)
    high = (u64(SECRET, 40) ^ u64(SECRET, 48)) - seed & MASK ^ u64(data, length - 8)
    return avalanche((length + swapped(low, 8) + high + folded(low, high)) & MASK)


def of_17_to_128_bytes(data: bytes, seed: int) -> int:
    length = len(data)
    total = length * PRIME64_1
    for pair in range((length - 1) // 32 + 1):
        total += mixed(data, 16 * pair, 32 * pair, seed)
        total += mixed(data, length - 16 * pair - 16, 32 * pair + 16, seed)
    return avalanche(total & MASK)


def of_129_to_240_bytes(data: bytes, seed: int) -> int:
    length = len(data)
    total = length * PRIME64_1
    for block in range(8):
        total += mixed(data, 16 * block, 16 * block, seed)
    total = avalanche(total & MASK)
    for block in range(8, length // 16):
        total += mixed(data, 16 * block, 16 * (block - 8) + 3, seed)
    total += mixed(data, length - 16, 119, seed)
    return avalanche(total & MASK)


def secret_of(seed: int) -> bytes:
    words = struct.unpack(f"<{len(SECRET) // 8}Q", SECRET)
    return struct.pack(f"<{len(words)}Q", *(word + (-seed if i % 2 else seed) & MASK for i, word in enumerate(words)))


def accumulate(lanes: list[int], data: bytes, at: int, secret: bytes, secret_at: int) -> None:
    values = struct.unpack_from("<8Q", data, at)
    keys = struct.unpack_from("<8Q", secret, secret_at)
    for i in range(8):
        key = values[i] ^ keys[i]
        lanes[i ^ 1] += values[i]
        lanes[i] += (key & 0xFFFFFFFF) * (key >> 32)
    for i in range(8):
        lanes[i] &= MASK


def scramble(lanes: list[int], secret: bytes) -> None:
    for i in range(8):
        lane = lanes[i] ^ lanes[i] >> 47 ^ u64(secret, len(secret) - STRIPE_BYTES + 8 * i)
        lanes[i] = lane * PRIME32_1 & MASK


def of_long(data: bytes, seed: int) -> int:
    secret = secret_of(seed)
    lanes = [PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1]
    # The last stripe, of the last 64 bytes, has its own place in the secret, even where it ends a block.
    for stripe in range((len(data) - 1) // STRIPE_BYTES):
        in_block = stripe % STRIPES_IN_BLOCK
        accumulate(lanes, data, STRIPE_BYTES * stripe, secret, 8 * in_block)
        if in_block == STRIPES_IN_BLOCK - 1:
            scramble(lanes, secret)
    accumulate(lanes, data, len(data) - STRIPE_BYTES, secret, len(secret) - STRIPE_BYTES - 7)
    total = len(data) * PRIME64_1
    for i in range(4):
        total += folded(lanes[2 * i] ^ u64(secret, 11 + 16 * i), lanes[2 * i + 1] ^ u64(secret, 19 + 16 * i))
    return avalanche(total & MASK)


def xxh3_64(data: bytes, seed: int = 0) -> int:
    if len(data) <= 16:
        return of_9_to_16_bytes(data, seed)
    if len(data) <= 128:
        return of_17_to_128_bytes(data, seed)
    if len(data) <= 240:
        return of_129_to_240_bytes(data, seed)
    return of_long(data, seed)
