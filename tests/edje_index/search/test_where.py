"""Filter expressions mean what SQLite says they mean, and hostile ones end in a
clear error.
"""

import contextlib
import datetime
import json
import sqlite3
import time

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edje_index.search.where import MAX_CHARACTERS, MAX_PARTS, parse_where
from storage_formats import UsageError

TIME = pa.timestamp("us", tz="UTC")
SCHEMA = pa.schema(
    {
        "width": pa.int32(),
        "n": pa.int64(),
        "score": pa.float64(),
        "licence": pa.string(),
        "uri": pa.string(),
        "safe": pa.bool_(),
        "taken": TIME,
        "captions": pa.list_(pa.string()),
        "exif.make": pa.string(),
    }
)
WORDS = st.one_of(
    st.sampled_from(["cc0", "by", "", "a dog", "a\ncat", "it's", "é", "%"]),
    st.text("ab_%\\", max_size=3),
)
SMALL = st.integers(-3, 3)
FLOATS = st.sampled_from([-1.5, -1.0, 0.0, 0.5, 1.0, 2.0, 1e300])
TIMES = st.datetimes(datetime.datetime(2024, 1, 1), datetime.datetime(2024, 1, 3)).map(
    lambda when: when.replace(
        hour=0, minute=0, second=0, microsecond=0, tzinfo=datetime.UTC
    )
)


def nullable(values):
    return st.one_of(st.none(), values)


ROW = st.fixed_dictionaries(
    {
        "width": nullable(SMALL),
        "n": nullable(st.one_of(SMALL, st.sampled_from([2**62, -(2**62)]))),
        "score": nullable(FLOATS),
        "licence": nullable(WORDS),
        "uri": WORDS,
        "safe": nullable(st.booleans()),
        "taken": nullable(TIMES),
        "captions": nullable(st.lists(WORDS, max_size=3)),
        "exif.make": nullable(WORDS),
    }
)
OPERATORS = st.sampled_from(["=", "!=", "<>", "<", "<=", ">", ">="])
WHOLE = st.one_of(SMALL.map(str), st.sampled_from([str(2**62), "+1", "1e0", "-2.0"]))
NUMBERS = st.one_of(SMALL.map(str), FLOATS.map(repr), st.sampled_from(["-2.50", ".5"]))
WHOLE_COLUMNS = st.sampled_from(["width", "n"])
NUMERIC = st.sampled_from(["width", "n", "score"])
TEXTUAL = st.sampled_from(["licence", "uri", '"exif.make"'])
TEXTS = WORDS.map(lambda text: "'" + text.replace("'", "''") + "'")
IN = st.sampled_from(["in", "NOT IN"])


def pairs(expression, sql, *parts):
    """Expressions, and the same for SQLite, with `parts` in place of the braces."""
    return st.tuples(*parts).map(
        lambda values: (expression.format(*values), sql.format(*values))
    )


def same(expression, *parts):
    return pairs(expression, expression, *parts)


def of_any(condition):
    exists = (
        f"EXISTS (SELECT 1 FROM json_each(captions) WHERE json_each.value {condition})"
    )
    return f"(CASE WHEN captions IS NULL THEN NULL ELSE {exists} END)"


CONDITIONS = st.one_of(
    same("{} {} {}", WHOLE_COLUMNS, OPERATORS, WHOLE),
    same("score {} {}", OPERATORS, NUMBERS),
    same("{} {} {}", NUMERIC, OPERATORS, NUMERIC),
    same("{} {} {}", TEXTUAL, OPERATORS, TEXTS | TEXTUAL),
    same("{} {} ({}, 1, 2)", WHOLE_COLUMNS, IN, WHOLE),
    same("score {} ({}, 1, 2)", IN, NUMBERS),
    same("{} {} ({}, {})", TEXTUAL, IN, TEXTS, TEXTS),
    same("{} {} {}", TEXTUAL, st.sampled_from(["like", "not like"]), TEXTS),
    same("{}", st.sampled_from(["safe", "safe = true", "safe != FALSE"])),
    same(
        "{} {}",
        st.sampled_from(["n", "safe", "captions", "taken"]),
        st.sampled_from(["is null", "IS NOT NULL"]),
    ),
    same("taken {} '{}'", OPERATORS, TIMES.map(datetime.datetime.isoformat)),
    pairs(
        "captions {} {}",
        of_any("{} {}"),
        st.sampled_from(["=", "<", "<=", ">", ">=", "like"]),
        TEXTS,
    ),
    pairs(
        "captions {} {}",
        f"NOT {of_any('= {1}')}",
        st.sampled_from(["!=", "<>"]),
        TEXTS,
    ),
    pairs("captions not in ({}, {})", f"NOT {of_any('in ({}, {})')}", TEXTS, TEXTS),
)
EXPRESSIONS = st.recursive(
    CONDITIONS,
    lambda inner: st.one_of(
        inner.map(lambda pair: (f"NOT ({pair[0]})", f"NOT ({pair[1]})")),
        st.tuples(inner, st.sampled_from(["and", "OR"]), inner).map(
            lambda parts: tuple(
                f"({left}) {parts[1]} ({right})"
                for left, right in zip(parts[0], parts[2], strict=True)
            )
        ),
    ),
    max_leaves=5,
)


def by_sqlite(rows, condition):
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.execute("PRAGMA case_sensitive_like = ON")
        names = ", ".join(f'"{name}"' for name in SCHEMA.names)
        database.execute(f"CREATE TABLE t ({names})")
        for row in rows:
            values = {
                **row,
                "captions": (
                    None if row["captions"] is None else json.dumps(row["captions"])
                ),
            }
            values["taken"] = None if row["taken"] is None else row["taken"].isoformat()
            marks = ", ".join("?" * len(SCHEMA.names))
            database.execute(
                f"INSERT INTO t VALUES ({marks})",
                [values[name] for name in SCHEMA.names],
            )
        return [
            bool(value)
            for (value,) in database.execute(
                f"SELECT {condition} FROM t ORDER BY rowid"
            )
        ]


@settings(max_examples=30)
@given(st.lists(ROW, min_size=1, max_size=8), EXPRESSIONS)
def test_expressions_mean_what_they_mean_in_sql(rows, pair):
    expression, sql = pair
    table = pa.Table.from_pylist(rows, SCHEMA)
    columns, passes = parse_where(expression, SCHEMA)
    expected = by_sqlite(rows, sql)
    assert passes(table.select(columns) if columns else table).tolist() == expected
    pieces = pa.concat_tables([table.slice(0, 2), table.slice(2)])
    assert passes(pieces.slice(1)).tolist() == expected[1:]


def test_a_backslash_in_a_pattern_is_no_escape():
    texts = [r"C:\photos\a.jpg", r"C:\photos", None]
    table = pa.table({"uri": texts})
    _, passes = parse_where(r"uri like 'C:\photos\%.jpg'", table.schema)
    assert passes(table).tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("a and b or c", True),
        ("a or b and c", True),
        ("not a and b", False),
        ("not (a and b)", True),
        ("android and ornate", False),
        ("NoT a OR c", True),
        ("a=True and b=false", True),
    ],
)
def test_precedence_and_words_that_begin_with_a_keyword(text, passes):
    names = ["a", "b", "c", "android", "ornate"]
    schema = pa.schema([(name, pa.bool_()) for name in names])
    table = pa.table([[True], [False], [True], [True], [False]], schema=schema)
    assert parse_where(text, schema)[1](table).tolist() == [passes]


@pytest.mark.parametrize(
    ("positive", "negated"),
    [
        ("captions = 'a'", "captions != 'a'"),
        ("captions = 'a'", "captions <> 'a'"),
        ("captions in ('a', 'c')", "captions not in ('a', 'c')"),
        ("captions like 'a%'", "captions not like 'a%'"),
    ],
)
def test_a_negated_condition_on_a_list_holds_if_no_text_matches(positive, negated):
    lists = [["a", "b"], ["b", None], [], None]
    table = pa.table({"captions": pa.array(lists, pa.list_(pa.string()))})
    for condition, expected in (
        (positive, [True, False, False, False]),
        (negated, [False, True, True, False]),
    ):
        assert parse_where(condition, SCHEMA)[1](table).tolist() == expected


def test_times_finer_than_a_microsecond_match_no_shorter_time():
    table = pa.table({"taken": pa.array([1_700_000_000_123_456], TIME)})
    text = "2023-11-14T22:13:20.123456"
    for zeros in ("", "000"):
        assert parse_where(f"taken = '{text}{zeros}'", SCHEMA)[1](table).tolist() == [
            True
        ]
    for digits in ("7", "001"):
        with pytest.raises(UsageError, match="in microseconds at the finest"):
            parse_where(f"taken = '{text}{digits}'", SCHEMA)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the filter is empty"),
        (
            "widht > 3",
            (
                r"no column widht \(did you mean width\?\); if it is a text, write"
                r" 'widht' in quotes; the columns are n \(int64\), .*width \(int32\)"
            ),
        ),
        (
            'licence = "cc0"',
            "there is no column cc0; a text is written in single quotes",
        ),
        ("width > 3; drop table rows", "from character 10 on, '; drop"),
        ("read_csv('/etc/passwd')", "from character 9 on"),
        (
            "width > 'wide'",
            (
                r"the column width \(int32\) cannot be compared with the constant"
                r" 'wide'; give a whole"
            ),
        ),
        ("width > 1.5", "give a whole number"),
        ("safe = 1", "give true or false"),
        *(
            (f"taken > {value}", "give a date and time")
            for value in (3, "'noon'", "'0001-01-01T00:00+23:00'")
        ),
        (
            "width = licence",
            (
                r"the column width \(int32\) cannot be compared with the column licence"
                r" \(string\)"
            ),
        ),
        ("width", r"the column width \(int32\) is not a condition"),
        ("width like 'a'", "'like' needs a column of texts, not the column width"),
        ("width = " + "9" * 3000, "does not fit in 64 bits"),
        ("licence like '%a%a%a%a%a%a%a%a%a'", "more than 8 wildcards"),
        ("n = 1 or " * 200 + "n = 1", f"more than {MAX_PARTS} conditions"),
        ("(" * 4000, "ends too early"),
        ("x" * (MAX_CHARACTERS + 1), "4097 characters"),
    ],
)
def test_clear_errors(text, message):
    with pytest.raises(UsageError, match=message) as caught:
        parse_where(text, SCHEMA)
    assert caught.value.parameter == "where"
    assert len(str(caught.value)) < 400


@given(st.text(st.sampled_from("()=<>'\"%_,. ornadtilkeuwhsc13\n-"), max_size=60))
def test_any_text_is_a_filter_or_a_usage_error(text):
    try:
        _, passes = parse_where(text, SCHEMA)
    except UsageError:
        return
    passes(pa.Table.from_pylist([], SCHEMA))


def test_deep_and_long_expressions_take_no_time():
    started = time.process_time()
    parse_where("(" * 2000 + "safe" + ")" * 2000, SCHEMA)
    parse_where(f"n in ({', '.join(['123'] * 800)})", SCHEMA)
    assert time.process_time() - started < 2
