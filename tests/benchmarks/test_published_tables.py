"""Tables of published runs that are incomplete, odd or of other machines: every row has cases or a reason."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_tables import ALPA, B200, KEYS, MEGATRON, MEGATRON_ROW, TORCHTITAN, VTRAIN, VTRAIN_ROW, cases_of, written

from benchmarks import published
from benchmarks.__main__ import main
from benchmarks.kept import Kept
from benchmarks.published import Figures
from benchmarks.published_runs.cases import Case
from benchmarks.published_runs.forms import FORMS, read_cases
from benchmarks.published_runs.machines import device_named
from benchmarks.published_runs.tables import Row, RowError


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("heads", "many"), ("hidden", ""), ("layers", "2.5"), ("gpus", "-8"), ("gpus", "20"), ("tp", "7")),
        ("gpus", "800000"),
        *(("micro_batch", "5"), ("vlayers", "7"), ("tflops_per_gpu", "nan")),
    ],
)
def test_a_bad_row_is_reported_by_line_and_column_and_leaves_the_others(
    column: str, value: str, tmp_path: Path
) -> None:
    cells = dict(zip(MEGATRON.split(","), MEGATRON_ROW.split(","), strict=True)) | {column: value}
    table = read_cases(written(tmp_path / "bad.csv", MEGATRON, ",".join(cells.values()), MEGATRON_ROW))
    assert table is not None
    assert list(table.cases) == cases_of(tmp_path / "good.csv", MEGATRON, MEGATRON_ROW)
    (bad,) = table.unread
    assert (bad.name, bad.column) == ("line 3", "tflops_per_gpu")
    assert re.match(rf"line 3, column '({column}|gpus)': ", bad.why)


@pytest.mark.parametrize(
    ("header", "row", "why"),
    [
        (MEGATRON, MEGATRON_ROW + ",1,2", "column '12': there are 11 columns"),
        (MEGATRON, MEGATRON_ROW.replace("256,8,2", "254,8,2"), "254 is no multiple of 4 heads"),
        (B200, "mixtral-8x7b,12,1,2,4,1,1,4096,4,843.0,66,70", "needs one of llama3-8b, llama3-70b, llama3-405b"),
        (B200, "llama3-70b,12,1,3,4,1,1,4096,4,843.0,66,70", "needs whole nodes of 8 devices, got 12 devices"),
        (TORCHTITAN, "8B,8,4,1,1,1,8192,2,selective,eager,5762,82.4", "4 x 1 x 1 x 1 devices are not 8"),
        (ALPA, "0.5,8,50,,,", "needs one of 0.355, 0.76"),
        (ALPA, "1.3,8,,,,", "the row has no figure"),
    ],
)
def test_rows_that_no_case_can_say_are_told_apart(header: str, row: str, why: str, tmp_path: Path) -> None:
    table = read_cases(written(tmp_path / "t.csv", header, row))
    assert table is not None
    assert not table.cases
    assert why in table.unread[0].why


def test_a_bad_figure_among_several_leaves_the_others(tmp_path: Path) -> None:
    table = read_cases(written(tmp_path / "t.csv", ALPA, "1.3,4,55,x,53,58", "1.3,4,-,OOM,53,n/a"))
    assert table is not None
    assert [one.column for one in table.cases] == ["megatron", "inter_only", "alpa", "inter_only"]
    assert [(one.name, one.column) for one in table.unread] == [("line 3", "intra_only"), ("line 4", "intra_only")]


@pytest.mark.parametrize("memory", ["", "n/a", "-", "x", "-3"])
def test_a_row_without_a_figure_of_memory_has_its_step(
    memory: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table = read_cases(written(tmp_path / "t.csv", B200, f"llama3-70b,12,2,1,4,1,1,4096,4,725.5,{memory},62.53"))
    assert table is not None
    assert [(one.published, one.memory) for one in table.cases] == [(725.5, None)]
    assert ("column 'peak_allocated_gib'" in caplog.text) == (memory in ("x", "-3"))


@pytest.mark.parametrize("text", [
    "\ufeff# byte order mark\n{header}\n{row}\n",
    "\n\n  # indented\n{header},,\n\n,,,\n{row}\n# in between\n\n{row},,\n   \n",
    "{header}\r\n{row}\r\n",
    '"# a comment, in quotes"\n{header}\n{row}\n',
])  # fmt: skip
def test_blank_lines_empty_cells_and_byte_order_marks_are_no_rows(text: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(text.format(header=VTRAIN, row=VTRAIN_ROW).encode())
    found = read_cases(path)
    assert found is not None
    assert not found.unread
    (wanted,) = cases_of(tmp_path / "plain.csv", VTRAIN, VTRAIN_ROW)
    assert set(found.cases) == {wanted}


def test_files_that_are_no_tables_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, (content, why) in enumerate(
        [
            (b"\xff\xfe\x00", "cannot be read as text"),
            (b"model,layers,model\na,b,c\n", "several columns are called model"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "runs.csv").write_bytes(content)
        assert main(["published", "--tables", str(folder), "--results", str(tmp_path / "r")]) == 2
        err = capsys.readouterr().err
        assert "runs.csv" in err
        assert why in err


def test_files_that_are_no_tables_leave_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "good.csv", MEGATRON, MEGATRON_ROW)
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "twice.csv").write_text("a,a\n1,2\n")
    (tmp_path / "long.csv").write_text("a,b\n1," + "x" * 140_000 + "\n")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "empty.csv").write_text(f"{MEGATRON}\n")
    out = tmp_path / "out.json"
    assert main(["published", "--tables", str(tmp_path), "--results", str(tmp_path / "r"), "--json", str(out)]) == 0
    assert list(json.loads(out.read_text())) == ["good"]
    printed = capsys.readouterr().err
    for line in (
        *("bytes.csv: skipped: ", "folder.csv: skipped: ", "twice.csv: skipped: ", "long.csv: skipped: "),
        *("other.csv: skipped, its columns are those of no known form", "empty.csv: skipped, it has no rows"),
    ):
        assert line in printed


CELLS = ["", "0", "1", "2", "3", "8", "16", "800000", "-1", "2.5", "1e3", "1e400", "nan", "x"]
CELLS += ["8B", "llama3-70b", "70B", "eager"]


@given(st.sampled_from([MEGATRON, VTRAIN, B200, TORCHTITAN, ALPA]), st.data())
def test_no_row_ends_reading(header: str, data: st.DataObject) -> None:
    """Each gives cases, or says why it gives none."""
    columns = header.split(",")
    cells = data.draw(st.lists(st.sampled_from(CELLS), min_size=len(columns), max_size=len(columns)))
    form = next(form for form in FORMS if form.columns <= set(columns))
    row = Row(Path("t.csv"), 1, dict(zip(columns, cells, strict=True)))
    try:
        found = list(form.read(row))
    except RowError:
        return
    assert found
    assert all(one.published > 0 and one.batch >= 1 for one in found if isinstance(one, Case))


@pytest.mark.parametrize(
    ("comments", "device"),
    [
        ("", "H100"),
        ("Megatron-LM, 8x H100 a node", "H100"),
        ("on 8xA100-80GB SXM", "A100-80"),
        ("A100 of 40 GB", "A100-40"),
        ("DGX B200, measured beside GB200", "B200"),
        ("H100 and H200", "H100"),
        ("A100 and H200", "H100"),
        ("8xH200", "H200"),
    ],
)
def test_comments_of_a_table_name_its_devices(comments: str, device: str) -> None:
    assert device_named(comments, "H100") == device


def test_tables_of_other_devices_have_their_data_sheets(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    for words, name in (("on H100", "H100"), ("measured on 8xA100", "A100-80"), ("", "B200 of SimuMax")):
        path.write_text(f"# {words}\n{B200}\nllama3-70b,12,2,1,4,1,1,4096,4,725.5,60.68,62.53\n")
        table = read_cases(path)
        assert table is not None
        assert {device.name for device in table.cases[0].cluster.node} == {name}


@pytest.mark.parametrize(
    ("variant", "beyond"),
    [
        ("eager", ""),
        ("compile", ""),
        ("compile+float8", "float8"),
        ("FP8 + AsyncTP", "float8 and asynchronous tensor parallelism"),
    ],
)
def test_float8_has_no_prediction(variant: str, beyond: str, tmp_path: Path) -> None:
    (one,) = cases_of(tmp_path / "t.csv", TORCHTITAN, f"8B,8,8,1,1,1,8192,2,selective,{variant},8532,76.8")
    assert one.not_expressed == beyond


def nothing_fits(cases: Sequence[Case]) -> list[Figures]:
    return [Figures(None, None, {}, 0, "no plan fits the memory") for _ in cases]


def test_a_table_of_misses_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(published, "_priced_in_turn", nothing_fits)
    written(tmp_path / "runs.csv", VTRAIN, VTRAIN_ROW, VTRAIN_ROW, VTRAIN_ROW.replace("single-node,8", "x,7"))
    written(tmp_path / "bad.csv", MEGATRON, MEGATRON_ROW.replace("0.01,4", "0.01,many"))
    out = tmp_path / "out.json"
    arguments = ["--json", str(out), "--results", str(tmp_path / "r")]
    assert main(["published", "--tables", str(tmp_path), *arguments]) == 0
    captured = capsys.readouterr()
    assert "runs.csv, line 5, column 'gpus'" in captured.err
    assert "needs a number, got 'many'" in " ".join(captured.out.split())
    data = json.loads(out.read_text())
    assert {name: len(table["without_prediction"]) for name, table in data.items()} == {"runs": 3, "bad": 1}
    for table in data.values():
        assert set(table) == KEYS
        assert [table[name] for name in KEYS - {"without_prediction", "rows"}] == [None] * 6
        assert len(table["rows"]) == len(table["without_prediction"])
        assert len({tuple(row) for row in table["rows"]}) == 1, "all rows have the same keys"


def test_kept_prices_are_those_of_the_same_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted run goes on only with tables that have not changed."""
    priced = []

    def count(cases: Sequence[Case]) -> list[Figures]:
        priced.append(len(cases))
        return nothing_fits(cases)

    monkeypatch.setattr(published, "_priced_in_turn", count)
    kept = Kept()
    for rows in ([VTRAIN_ROW], [VTRAIN_ROW], [VTRAIN_ROW.replace(",2,2,2,50", ",4,2,1,50")]):
        written(tmp_path / "runs.csv", VTRAIN, *rows)
        published.run_published(tmp_path, quick=False, kept=kept)
    assert priced == [1, 1]
