"""Is what a snippet printed what it promised?

Exactly, except that a number with a decimal point may differ by one in its last digit:
another processor adds in another order. Whole numbers and words may not differ at all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

# Blanks in front belong to the number: a column keeps its width when 10.00 becomes 9.99.
# Not a number with a decimal point: the 2.13 in 2.13.0, or digits inside a word.
DECIMAL = re.compile(r"[ ]*(?<![\w.])-?\d+\.\d+(?:[eE][-+]?\d+)?(?!\w|\.\d)")


def differences(promise: Sequence[str], printed: Sequence[str]) -> list[str]:
    """Compare line by line.

    Args:
        promise: The lines of the docstring.
        printed: The lines of the run.

    Returns:
        One sentence per line that differs; empty when the promise is kept.
    """
    found = []
    for number in range(max(len(promise), len(printed))):
        expected = promise[number].rstrip() if number < len(promise) else None
        actual = printed[number].rstrip() if number < len(printed) else None
        if expected is None or actual is None or not same_line(expected, actual):
            found.append(
                f"line {number + 1}: promised {quoted(expected)}, printed {quoted(actual)}"
            )
    return found


def quoted(line: str | None) -> str:
    """Show a line, or that there is none."""
    return "nothing" if line is None else repr(line)


def same_line(expected: str, actual: str) -> bool:
    """Tell whether two lines agree, decimals to within one in the last digit."""
    if expected == actual:
        return True
    if DECIMAL.sub("\0", expected) != DECIMAL.sub("\0", actual):
        return False
    pairs = zip(DECIMAL.findall(expected), DECIMAL.findall(actual), strict=True)
    return all(same_number(left, right) for left, right in pairs)


def same_number(left: str, right: str) -> bool:
    """Tell whether two printed decimals differ by at most one in their last digit."""
    blanks = len(left) - len(left.lstrip()), len(right) - len(right.lstrip())
    if len(left) != len(right) and blanks[0] != blanks[1]:
        return False  # neither the same column nor the same sentence
    if decimals(left) != decimals(right):
        return False
    return abs(Decimal(left.strip()) - Decimal(right.strip())) <= max(unit(left), unit(right))


def decimals(number: str) -> int:
    """Count the digits after the point."""
    mantissa = re.split("[eE]", number.strip())[0]
    return len(mantissa.partition(".")[2])


def unit(number: str) -> Decimal:
    """Return what one in the last printed digit is worth."""
    exponent = Decimal(number.strip()).as_tuple().exponent
    assert isinstance(exponent, int)  # the pattern admits neither nan nor inf
    return Decimal(1).scaleb(exponent)
