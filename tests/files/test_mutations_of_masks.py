"""Every change of a result's masks or weights is found by verify."""

from pathlib import Path

import numpy as np

from distprune.files.checkpoints.header import read_header
from distprune.files.checkpoints.mask_files import MASK_FILE, open_masks


class Bits:
    """The masks and values of a result, to be changed one by one."""

    def __init__(self, source, target):
        self.source, self.target = source, target
        self.masks = open_masks(target)
        self.entries = {
            t.name: t
            for path in sorted(source.glob("*.safetensors"))
            for t in read_header(path, path.name).tensors
            if t.name in self.masks.shapes
        }

    def keep(self, name):
        start, numel = self.masks.starts[name], self.entries[name].numel
        raw = Path(self.masks.path).read_bytes()[start:]
        bits = np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little", count=numel)
        return bits.astype(bool)

    def flip(self, name, index, with_value=True):
        keep = not self.keep(name)[index]
        write(self.masks.path, self.masks.starts[name] + index // 8, xor=1 << index % 8)
        if with_value:
            self.put(name, index, self.original(name, index) if keep else None)

    def original(self, name, index):
        entry = self.entries[name]
        size = entry.nbytes // entry.numel
        start = entry.start + index * size
        return (self.source / entry.file).read_bytes()[start : start + size]

    def put(self, name, index, raw):
        entry = self.entries[name]
        size = entry.nbytes // entry.numel
        start = entry.start + index * size
        write(self.target / entry.file, start, raw=bytes(size) if raw is None else raw)

    def some(self, keep):
        """(name, index) of elements that are kept or not, at both ends and between."""
        for name in self.entries:
            where = np.flatnonzero(self.keep(name) == keep).tolist()
            for index in sorted({*where[:1], *where[len(where) // 2 :][:1], *where[-1:]}):
                yield name, index


def write(path, offset, xor=0, raw=None):
    data = bytearray(Path(path).read_bytes())
    raw = bytes([data[offset] ^ xor]) if raw is None else raw
    data[offset : offset + len(raw)] = raw
    Path(path).write_bytes(data)


def test_a_flipped_bit_of_a_mask(found, made):
    bits = Bits(*made)
    for keep in (True, False):
        for name, index in bits.some(keep):
            if any(bits.original(name, index)):
                problems = found(lambda _, n=name, i=index: bits.flip(n, i, with_value=False))
                assert any(name in problem for problem in problems)
            problems = found(lambda _, n=name, i=index: bits.flip(n, i))
            wrong, count = problems
            assert wrong.startswith(f"{name}: 1 elements are pruned or kept against the order")
            assert wrong.endswith(f"number {index}.") and "are pruned in all" in count


def test_two_exchanged_bits_of_masks(found, made):
    bits = Bits(*made)
    num_pairs = 0
    for one in bits.some(True):
        for other in bits.some(False):

            def exchange(target, one=one, other=other):
                bits.flip(*one)
                bits.flip(*other)

            problems = found(exchange)
            assert all("against the order of scores" in problem for problem in problems)
            assert len(problems) == len({one[0], other[0]})
            num_pairs += 1
    is_mixed = any(bits.some(True)) and any(bits.some(False))
    assert num_pairs > 20 or not is_mixed


def test_two_exchanged_masks(found, made):
    bits = Bits(*made)
    pairs = [
        (one, other)
        for one in bits.entries
        for other in bits.entries
        if one < other
        and bits.entries[one].numel == bits.entries[other].numel
        and (bits.keep(one) != bits.keep(other)).any()
    ]
    for one, other in pairs:
        for with_value in (True, False):

            def exchange(target, one=one, other=other, with_value=with_value):
                for index in np.flatnonzero(bits.keep(one) != bits.keep(other)).tolist():
                    bits.flip(one, index, with_value)
                    bits.flip(other, index, with_value)

            assert found(exchange)


def test_a_changed_weight(found, made):
    bits = Bits(*made)
    for name, index in bits.some(False):
        size = len(bits.original(name, index))
        negative_zero = bytes(size - 1) + b"\x80"
        for value in (bits.original(name, index), negative_zero, b"\x01" * size):
            if any(value):
                (problem,) = found(lambda _, v=value, n=name, i=index: bits.put(n, i, v))
                assert problem.startswith(name) and f"number {index}." in problem
    for name, index in bits.some(True):
        raw = bits.original(name, index)
        for value in (bytes(len(raw)), raw[:-1] + bytes([raw[-1] ^ 0x80])):
            if value != raw:
                (problem,) = found(lambda _, v=value, n=name, i=index: bits.put(n, i, v))
                assert problem.startswith(name) and f"number {index}." in problem


def test_bits_behind_the_end_of_a_mask(found, made):
    bits = Bits(*made)
    odd = [name for name, entry in bits.entries.items() if entry.numel % 8]
    assert odd
    for name in odd:
        for bit in range(bits.entries[name].numel % 8, 8):
            last = bits.masks.starts[name] + bits.entries[name].numel // 8
            (problem,) = found(lambda _, at=last, bit=bit: write(bits.masks.path, at, xor=1 << bit))
            assert problem.startswith(name) and "belong to no element" in problem


def test_any_byte_of_the_header_of_the_masks(found, made):
    start = min(open_masks(made[1]).starts.values())
    for offset in range(0, start, 7):
        problems = found(lambda target, at=offset: write(target / MASK_FILE, at, xor=1))
        assert any("masks.safetensors: its header" in problem for problem in problems)
