"""The dimension that numbers state: found from the sizes of a tensor at several assignments of names.

Protocol. `assignments(names, scalars, fixed)` are sizes for names, distinct primes where they can be;
`fitted( numbers, sizes, texts)` is the simplest dimension that is `numbers[k]` at `sizes[k]`: one that is
written in the annotations, a constant, a multiple of a product of up to three names, a quotient of such, or a
sum of two or three of them. Each has at most so many unknown coefficients that assignments are left over to
refute it. None where no such is found.
"""
from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from math import prod

from tinygrad_nv.shapes.dims import Dim

COUNT = 5   # assignments: two more than the coefficients of the largest sum
PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107,
          109, 113, 127, 131, 137, 139, 149, 151, 157, 163, 167, 173, 179, 181, 191, 193, 197, 199, 211, 223)
SMALL = (2, 3, 5, 7, 4, 9, 8, 6)
Sizes = dict[str, int]


def assignments(names: Sequence[str], scalars: Sequence[str],
                fixed: Mapping[str, int]) -> Iterator[list[Sizes]]:
    """Assignments in the order in which they are tried: all primes; with scalars that divide all else; with
    multiples of 64, scalars powers of 2."""
    # scalars first: they are the smallest, as what is divided by them should be something
    free = sorted((name for name in names if name not in fixed), key=lambda name: name not in scalars)
    def primes(name: str, k: int) -> int: return PRIMES[(free.index(name) * COUNT + k) % len(PRIMES)]
    yield [{**fixed, **{name: primes(name, k) for name in free}} for k in range(COUNT)]
    own = [name for name in free if name in scalars]
    for unit, counts in ((1, SMALL), (64, (2, 4, 8, 16, 32))):
        made = []
        for k in range(COUNT):
            few = {name: counts[(i + k) % len(counts)] for i, name in enumerate(own)}
            whole = unit * prod([*few.values(), *(fixed[name] for name in scalars if name in fixed)])
            rest = {name: whole * primes(name, k) for name in free if name not in few}
            made.append({**fixed, **few, **rest})
        yield made


def fit_dim(numbers: Sequence[int], sizes: Sequence[Sizes], written: Mapping[str, Dim]) -> str | None:
    """The dimension, as text; `to_text` are those of annotations."""
    for text, dim in written.items():
        if dim.symbols and all(dim.value(at) == number for at, number in zip(sizes, numbers, strict=True)):
            return text
    if len(set(numbers)) == 1: return str(numbers[0])
    names = list(sizes[0])
    products = [Dim.of([(names_, 1)]) for degree in (1, 2, 3)
                for names_ in itertools.combinations_with_replacement(names, degree)]
    found = _quotient(numbers, sizes, products) or _sums(numbers, sizes, products)
    if found is None: return None
    return found.to_text(lambda name: names.index(name) if name in names else len(names))


def _quotient(numbers: Sequence[int], sizes: Sequence[Sizes], products: list[Dim]) -> Dim | None:
    """A multiple of a product, or one of it by a name or a small number."""
    for dim in products:
        values = [dim.value(at) or 0 for at in sizes]
        if (factor := _same(numbers, values)) is not None and factor.denominator == 1:
            return dim * Dim.number(int(factor))
    names = [Dim.symbol(name) for name in sizes[0]]
    for dim, under in itertools.product(products, (*names, *map(Dim.number, (2, 3, 4, 8, 16, 32, 64)))):
        made = dim // under
        if all(made.value(at) == number for at, number in zip(sizes, numbers, strict=True)): return made
    return None


def _same(numbers: Sequence[int], values: Sequence[int]) -> Fraction | None:
    ratios = {Fraction(number, value) for number, value in zip(numbers, values, strict=True) if value}
    return ratios.pop() if len(ratios) == 1 else None


def _sums(numbers: Sequence[int], sizes: Sequence[Sizes], products: list[Dim]) -> Dim | None:
    """A sum with whole coefficients of a product and a constant, of two products, or of two and a
    constant."""
    one = Dim.number(1)
    bases: list[tuple[Dim, ...]] = [*((dim, one) for dim in products), *itertools.combinations(products, 2)]
    small = [dim for dim in products if len(dim.terms[0][0]) <= 2]
    bases += [(*pair, one) for pair in itertools.combinations(small, 2)]
    for basis in bases:
        rows = [[dim.value(at) or 0 for dim in basis] for at in sizes]
        if (factors := _solve(rows, numbers)) is None: continue
        total = Dim(())
        for dim, factor in zip(basis, factors, strict=True): total = total + dim * Dim.number(factor)
        return total
    return None


def _solve(rows: list[list[int]], numbers: Sequence[int]) -> list[int] | None:
    """Whole coefficients with rows · coefficients = numbers in all rows, of which there are more."""
    n = len(rows[0])
    matrix = [[Fraction(each) for each in (*row, number)] for row, number in zip(rows, numbers, strict=True)]
    for column in range(n):
        pivot = next((i for i in range(column, len(matrix)) if matrix[i][column]), None)
        if pivot is None: return None
        matrix[column], matrix[pivot] = matrix[pivot], matrix[column]
        head = matrix[column] = [each / matrix[column][column] for each in matrix[column]]
        for i, row in enumerate(matrix):
            if i != column and row[column]:
                matrix[i] = [a - row[column] * b for a, b in zip(row, head, strict=True)]
    if any(row[n] for row in matrix[n:]): return None
    found = [row[n] for row in matrix[:n]]
    return [int(each) for each in found] if all(each.denominator == 1 for each in found) else None
