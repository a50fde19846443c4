"""Bytes with something wrong in them."""

from random import Random


def mutate(content: bytes, random: Random) -> tuple[bytes, str]:
    """The content with one random change, and what that was."""
    kind = random.choices(("flip", "flips", "cut", "insert", "drop", "zero", "copy"), (8, 2, 2, 2, 1, 1, 1))[0]
    size = len(content)
    changed, at = bytearray(content), random.randrange(size) if size else 0
    length = min(random.choice((1, 2, 4, 16, 256)), max(1, size - at))
    if kind == "cut":
        del changed[at:]
    elif kind == "insert" or not size:
        changed[at:at] = random.randbytes(length)
    elif kind == "drop":
        del changed[at : at + length]
    elif kind == "zero":
        changed[at : at + length] = bytes(length)
    elif kind == "copy":
        source = random.randrange(size)
        changed[at : at + length] = content[source : source + length]
    else:
        for place in [at, *(random.randrange(size) for _ in range(random.randint(1, 8) if kind == "flips" else 0))]:
            changed[place] ^= 1 << random.randrange(8)
    return bytes(changed), f"{kind} at byte {at} of {size}"
