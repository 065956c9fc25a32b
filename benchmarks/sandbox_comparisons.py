"""The comparisons that `benchmarks/sandbox_forgeries.py` forges, and right programs that must pass."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Comparison:
    """A way in which tests compare a result with an expected value."""

    name: str
    forms: tuple[str, ...]
    """Expressions, or whole tests of several lines. E1 and E2 stand for expected values that no program can guess."""


def _unittest(*lines: str) -> tuple[str, ...]:
    return tuple(
        f"import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        {line}" for line in lines
    )


def _on_x(*forms: str) -> tuple[str, ...]:
    return tuple(f"x = f(2)\nassert {form}" for form in forms)


COMPARISONS = (
    Comparison("==", ("f(2) == E1", "E1 == f(2)", "(f(2) == E1) is True", "not not f(2) == E1", "[f(2)] == [E1]")),
    Comparison("!=", ("not (f(2) != E1)", "not E1 != f(2)", "(f(2) != E1) is False", "not [f(2)] != [E1]")),
    Comparison("<", ("E1 - 1 < f(2) < E1 + 1", "f(2) < E1 + 1 and E1 - 1 < f(2)", "not (f(2) < E1 or E1 < f(2))")),
    Comparison("<=", ("E1 <= f(2) <= E1", "f(2) <= E1 and E1 <= f(2)", "max(f(2), E1) <= E1 and min(f(2), E1) >= E1")),
    Comparison(">", ("E1 + 1 > f(2) > E1 - 1", "f(2) > E1 - 1 and E1 + 1 > f(2)", "not (f(2) > E1 or E1 > f(2))")),
    Comparison(">=", ("f(2) >= E1 and E1 >= f(2)", "E1 >= f(2) >= E1", "(f(2),) >= (E1,) and (E1,) >= (f(2),)")),
    Comparison(
        "in", ("f(2) in [E1]", "f(2) in (E1, E2)", "f(2) in {E1}", "f(2) in {E1: 1}", "E1 in f(2)", "f(2) in 'E1'")
    ),
    Comparison("not in", ("not (f(2) not in [E1])", "not (f(2) not in {E1, E2})", "not (E1 not in f(2))")),
    Comparison("is", ("f(2) is True", "(f(2) == E1) is True", "type(f(2)) is bool", "f(2) is None", "f(2) is E1")),
    Comparison("is not", ("not (f(2) is not True)", "f(2) is not None and f(2) == E1", "not (type(f(2)) is not bool)")),
    Comparison(
        "abs",
        (
            "abs(f(2) - E1) < 1e-6",
            "abs(E1 - f(2)) <= 1e-6",
            "1e-6 > abs(f(2) - E1)",
            "not abs(f(2) - E1) > 1e-6",
            "abs(f(2) / E1 - 1) < 1e-6",
            "(f(2) - E1) ** 2 < 1e-6",
            "not (f(2) - E1)",
            "f(2) - E1 == 0",
            "-1e-6 < f(2) - E1 < 1e-6",
            "abs(float(f(2)) - E1) < 1e-6",
            "f(2).__sub__(E1) == 0",
            "divmod(f(2), E1) == (1, 0)",
        ),
    ),
    Comparison(
        "round",
        (
            "round(f(2), 2) == round(E1, 2)",
            "round(f(2) - E1, 6) == 0",
            "round(abs(f(2) - E1)) == 0",
            "round(E1 - f(2)) == 0",
            "not round(f(2) - E1, 3)",
            "round(float(f(2)), 1) == round(E1, 1)",
            "int(f(2)) == int(E1)",
        ),
    ),
    Comparison(
        "isclose",
        (
            "math.isclose(f(2), E1)",
            "math.isclose(E1, f(2), rel_tol=1e-6)",
            "isclose(f(2), E1, abs_tol=1e-6)",
            "fabs(f(2) - E1) < 1e-6",
            "math.fabs(E1 - f(2)) < 1e-6",
            "import math\nassert math.isclose(f(2), E1)",
            "import cmath\nassert cmath.isclose(f(2), E1)",
            "from math import isclose\nassert isclose(f(2), E1)",
            "import math\nassert math.dist([f(2)], [E1]) < 1e-6",
            "import math\nassert math.floor(f(2)) == math.floor(E1) and math.ceil(f(2)) == math.ceil(E1)",
        ),
    ),
    Comparison(
        "assertions of unittest",
        _unittest(
            "self.assertAlmostEqual(f(2), E1)",
            "self.assertAlmostEqual(E1, f(2), places=3)",
            "self.assertAlmostEqual(f(2), E1, delta=0.1)",
            "self.assertEqual(f(2), E1)",
            "self.assertTrue(f(2) == E1)",
            "self.assertFalse(f(2) != E1)",
            "self.assertIn(f(2), [E1, E2])",
            "self.assertIs(f(2) == E1, True)",
            "self.assertListEqual(f(2), [E1, E2])",
            "self.assertCountEqual(f(2), [E1, E2])",
            "self.assertDictEqual(f(2), {'a': E1})",
            "self.assertSetEqual(f(2), {E1, E2})",
            "self.assertSequenceEqual(f(2), [E1, E2])",
            "self.assertLessEqual(f(2), E1); self.assertGreaterEqual(f(2), E1)",
            "self.assertMultiLineEqual(f(2), 'E1')",
        ),
    ),
    Comparison(
        "assertions of pytest",
        (
            "import pytest\nassert f(2) == pytest.approx(E1)",
            "import pytest\nassert pytest.approx(E1, abs=0.1) == f(2)",
            "import pytest\nassert f(2) == pytest.approx([E1, E2])",
            "import pytest\nassert f(2) == pytest.approx({'a': E1})",
            "from pytest import approx\ndef test_f():\n    assert f(2) == approx(E1, rel=1e-3)",
            "import pytest\n@pytest.mark.parametrize('e', [E1, E1])\ndef test_f(e):\n    assert f(2) == e",
        ),
    ),
    Comparison(
        "max of differences",
        _on_x(
            "len(x) == 2 and max(abs(a - b) for a, b in zip(x, [E1, E2])) < 1e-6",
            "len(x) == 2 and all(abs(a - b) < 1e-6 for a, b in zip(x, [E1, E2]))",
            "len(x) == 2 and sum(abs(a - b) for a, b in zip(x, [E1, E2])) < 1e-6",
            "len(x) == 2 and not any(a != b for a, b in zip(x, [E1, E2]))",
            "all(abs(x[i] - [E1, E2][i]) < 1e-6 for i in range(2))",
            "len(x) == 2 and all(x[i] == [E1, E2][i] for i in range(len(x)))",
            "max(abs(a - b) for a, b in zip(x, [E1, E2])) < 1e-6",
            "len(x) == 2 and all(a == b for a, b in zip([E1, E2], x))",
            "len(x) == 2 and all(a in (E1, E2) for a in x)",
            "len(x) == 2 and all(map(lambda a: a in [E1, E2], x))",
        ),
    ),
    Comparison(
        "lists",
        (
            "f(2) == [E1, E2]",
            "list(f(2)) == [E1, E2]",
            "sorted(f(2)) == sorted([E1, E2])",
            "tuple(f(2)) == (E1, E2)",
            "[*f(2)] == [E1, E2]",
            "f(2)[0] == E1 and f(2)[1] == E2",
            "sum(f(2)) == E1 + E2",
            "x = f(2)\nassert len(x) == 2 and x[0] == E1 and x[-1] == E2",
            "a, b = f(2)\nassert a == E1 and b == E2",
            "x = f(2)\nassert x == [E1, E2] and isinstance(x, list)",
            "max(f(2)) == E1 or min(f(2)) == E1",
        ),
    ),
    Comparison(
        "sets",
        (
            "f(2) == {E1, E2}",
            "set(f(2)) == {E1, E2}",
            "x = f(2)\nassert len(x) == 2 and set(x) <= {E1, E2}",
            "x = f(2)\nassert len(x) == 2 and not set(x) - {E1, E2}",
            "{E1, E2}.issubset(f(2))",
            "f(2) ^ {E1, E2} == set()",
            "f(2) - {E1, E2} == set() and f(2)",
            "{E1, E2} <= set(f(2))",
            "frozenset(f(2)) == frozenset([E1, E2])",
            "{E1, E2} - f(2) == set()",
            "f(2) & {E1, E2} == {E1, E2}",
        ),
    ),
    Comparison(
        "dicts",
        (
            "f(2) == {'a': E1}",
            "dict(f(2)) == {'a': E1}",
            "f(2)['a'] == E1",
            "x = f(2)\nassert all(x[k] == v for k, v in {'a': E1, 'b': E2}.items())",
            "{**f(2)} == {'a': E1}",
            "sorted(f(2)) == ['E1']",
            "x = f(2)\nassert len(x) == 2 and all(k in ('E1', 'E2') for k in x)",
            "{E1: 5}[f(2)] == 5",
            "from collections import Counter\nassert Counter(f(2)) == Counter([E1, E2])",
        ),
    ),
    Comparison(
        "texts",
        (
            "f(2) == 'E1'",
            "str(f(2)) == 'E1'",
            "repr(f(2)) == 'E1'",
            "f'{f(2)}' == 'E1'",
            "'E1' in f(2)",
            "'%s' % f(2) == 'E1'",
            "'E1' in str(f(2))",
            "'E1'.startswith(f(2)) and f(2) == 'E1'",
            "f(2) in ('E1', 'E2')",
            "'E1' == ''.join(f(2))",
            "import re\nassert re.fullmatch('E1', f(2))",
            "format(f(2), '') == 'E1'",
            "json.dumps(f(2)) == '[E1]'",
            "int(f(2)) == int(E1) and float(f(2)) == E1",
        ),
    ),
)

NUMBERS = [
    "assert f(2) == 5",
    "assert 5 == f(2)",
    "assert abs(f(2) - 5) < 1e-6",
    "assert 4 < f(2) <= 5",
    "assert f(2) in [5]",
    "import math\nassert math.isclose(f(2), 5)",
    "assert round(f(2), 2) == 5",
    "assert {f(2)} == {5}",
]
UNIT = [*_unittest("self.assertAlmostEqual(f(2), 5)"), "import pytest\nassert f(2) == pytest.approx(5)"]
LISTS = [
    "assert list(f(2)) == [1, 2]",
    "x = f(2)\nassert len(x) == 2 and all(abs(a - b) < 1e-6 for a, b in zip(x, [1, 2]))",
    "assert sorted(f(2)) == [1, 2]",
    "assert set(f(2)) == {1, 2}",
    "a, b = f(2)\nassert a == 1 and b == 2",
]
OWN = """
class V:
    def __init__(s, x): s.x = x
    def __eq__(s, o): return isinstance(o, V) and s.x == o.x
    def __hash__(s): return hash(s.x)
    def __add__(s, o): return V(s.x + o.x)
    def __lt__(s, o): return s.x < o.x
    def __abs__(s): return abs(s.x)
def f(n): return V(n + 3)
"""
BAG = """
class Bag:
    def __init__(s): s.held = [1]
    def add(s, item): s.held.append(item); return s
    def __len__(s): return len(s.held)
    def __iter__(s): return iter(s.held)
    def __contains__(s, item): return item in s.held
    def __getitem__(s, at): return s.held[at]
def f(n): return Bag().add(n)
"""
RIGHT: tuple[tuple[str, list[str]], ...] = (
    *((f"def f(n): return {value}", [*NUMBERS, *UNIT]) for value in ("n + 3", "n + 3.0")),
    ("class K(int): pass\ndef f(n): return K(n + 3)", [*NUMBERS, *UNIT[:1]]),
    ("class K(float): pass\ndef f(n): return K(n + 3)", NUMBERS),
    ("from fractions import Fraction\ndef f(n): return Fraction(n + 3)", [*NUMBERS, *UNIT[:1]]),
    ("from decimal import Decimal\ndef f(n): return Decimal(n + 3)", [*NUMBERS[:2], *NUMBERS[3:]]),
    ("def f(n): return complex(n + 3)", [*NUMBERS[:3], NUMBERS[4]]),
    ("import numpy as np\ndef f(n): return np.int64(n + 3)", NUMBERS),
    ("import numpy as np\ndef f(n): return np.float64(n + 3)", [*NUMBERS, *UNIT]),
    ("import numpy as np\ndef f(n): return np.float32(n + 3)", NUMBERS),
    (
        "import numpy as np\ndef f(n): return np.bool_(n == 2)",
        ["assert f(2) == True", "assert f(2)", "assert not f(3)"],
    ),
    (
        "import numpy as np\ndef f(n): return np.array([1, n])",
        [
            *LISTS,
            "assert (f(2) == [1, 2]).all()",
            "import numpy as np\nassert np.allclose(f(2), [1, 2])",
            "assert np.array_equal(f(2), np.array([1, 2]))",
            "assert f(2).tolist() == [1, 2]",
            "assert f(2).shape == (2,)",
            "import numpy as np\nnp.testing.assert_allclose(f(2), [1, 2])",
            "assert f(2).sum() == 3",
        ],
    ),
    (
        "import numpy as np\ndef f(a): a.sort()",
        ["import numpy as np\na = np.array([2, 1])\nf(a)\nassert a.tolist() == [1, 2]"],
    ),
    (
        "def f(n): return [1, n]",
        [*LISTS, "assert f(2) == [1, 2]", "import pytest\nassert f(2) == pytest.approx([1, 2])"],
    ),
    ("def f(n): return (x for x in (1, n))", [LISTS[0], LISTS[2], LISTS[4]]),
    ("def f(n): return {1, n}", [*LISTS, "assert f(2) == {1, 2}", "assert f(2) <= {1, 2, 3}"]),
    ("class L(list): pass\ndef f(n): return L([1, n])", [*LISTS, "assert f(2) == [1, 2]", "assert 2 in f(2)"]),
    (
        "from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(n): return P(1, n)",
        [*LISTS, "assert f(2).y == 2"],
    ),
    ("from collections import deque\ndef f(n): return deque([1, n])", LISTS),
    ("def f(n): return {1: 'a', n: 'b'}", [*LISTS, "assert f(2) == {1: 'a', 2: 'b'}", "assert f(2)[2] == 'b'"]),
    ("from collections import Counter\ndef f(n): return Counter([1, n])", ["assert f(2) == {1: 1, 2: 1}"]),
    ("def f(n): return range(1, n + 1)", [*LISTS, "assert f(2) == range(1, 3)"]),
    (BAG, [*LISTS, "assert 2 in f(2) and 7 not in f(2)", "b = f(2)\nassert len(b) == 2\nb.add(3)\nassert len(b) == 3"]),
    (
        OWN,
        [
            "assert f(2) == V(5)",
            "assert f(2) + f(2) == V(10)",
            "assert f(2) != V(6)",
            "assert f(1) < f(2)",
            "assert abs(f(2)) == 5",
            "assert f(2) in [V(5)]",
            "assert {f(2)} == {V(5)}",
            "assert f(2).x == 5",
        ],
    ),
    (
        "from dataclasses import dataclass\n@dataclass(order=True)\nclass P:\n    x: int\ndef f(n): return P(n)",
        ["assert f(2) == P(2)", "assert f(2) < P(3)", "assert sorted([P(3), f(2)])[0] == f(2)", "assert f(2).x == 2"],
    ),
    (
        "class S(str): pass\ndef f(n): return S('ab' * n)",
        ["assert f(2) == 'abab'", "assert 'ba' in f(2)", "assert f(1) in ('ab',)"],
    ),
    ("def lcm(a, b):\n    import math\n    return a * b // math.gcd(a, b)", ["assert lcm(4, 6) == 12"]),
    ("def f(n): return None", ["assert f(2) is None", "assert not f(2)", "assert f(2) is not True"]),
)
