"""A tables folder that came from elsewhere leads nowhere: links in it are refused, what they lead to is not touched."""

from __future__ import annotations

import pytest

from tracefit.commands.ingest import ingest, plan_ingest
from tracefit.errors import DataError, UsageError
from tracefit.tables.store import TableStore

READ = ("spans", "spans/run_id=run", "spans/run_id=run/*.parquet", "manifest.json")
WRITTEN = (*READ, ".stage", ".stage/*", ".stage/*/spans.arrow", "timeline", "kv_events/run_id=run")


@pytest.fixture
def received(tmp_path, traces):
    """Return a function that ingests a run, which then grows, and moves some of the tables away, a link in its place.

    It gives the run, the tables, the link, and a function that tells what is behind it.
    """

    def make(place):
        run = traces.request(1, 0, step=1).steps(traces.summary(1, 5000)).write(tmp_path / "run")
        ingest([run], tmp_path / "tables")
        traces.request(2, 0, step=2).write(run)
        link = next((tmp_path / "tables").glob(place))
        away = link.rename(tmp_path / "away")
        if away.is_dir():
            (away / "own_file").mkdir()
            (away / "own_file" / "part-of-me.parquet").write_text("own_file")
        link.symlink_to(away)
        return run, tmp_path / "tables", link, lambda: _within(away)

    return make


def _within(place):
    """List a file or a folder with everything in it."""
    return {p: p.is_file() and p.read_bytes() for p in (place, *place.rglob("*"))}


def _refused(link):
    return pytest.raises(UsageError, match=f"^{link}: is a symbolic link")


@pytest.mark.mostly_slow(every=5)
@pytest.mark.parametrize("place", WRITTEN)
def test_nothing_behind_a_link_is_written_or_removed(received, place):
    run, tables, link, behind = received(place)
    before = behind()
    with _refused(link) as refused:
        ingest([run], tables)
    assert refused.value.exit_code == 2
    assert behind() == before
    assert link.is_symlink()


@pytest.mark.mostly_slow(every=4)
@pytest.mark.parametrize("place", READ)
def test_nothing_behind_a_link_is_read(received, place):
    _, tables, link, _ = received(place)
    with _refused(link):
        TableStore(tables).read("spans")


@pytest.mark.slow
def test_nothing_outside_is_read_by_the_name_of_a_run(tmp_path, traces):
    ingest([traces.request(1, 0, step=1).write(tmp_path / "run")], tmp_path / "tables")
    spans = tmp_path / "tables" / "spans"
    (spans / "run_id=run").rename(tmp_path / "away")
    (spans / "run_id=..").mkdir()
    manifest = tmp_path / "tables" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"run":', '"../../../../away":'))
    with pytest.raises(DataError, match=r"manifest\.json: is not a manifest of this version of tracefit"):
        TableStore(tmp_path / "tables").read("spans")


def test_nor_does_a_plan_look_there(received):
    run, tables, link, _ = received(".stage")
    with _refused(link):
        plan_ingest([run], tables)


@pytest.fixture
def beside(tmp_path, traces):
    """Return a function that ingests a run and lays a link beside its tables; it gives run, link and what is behind."""

    def make(name):
        run = traces.request(1, 0, step=1).write(tmp_path / "run")
        ingest([run], tmp_path / "tables")
        own_file = tmp_path / "own" / "run_id=run" / "part-0123456789abcdef.parquet"
        own_file.parent.mkdir(parents=True)
        own_file.write_text("own_file")
        link = tmp_path / "tables" / name
        link.symlink_to(tmp_path / "own")
        traces.request(2, 0, step=2).write(run)
        return run, link, own_file

    return make


def test_a_leftover_of_a_writer_that_died_is_no_link(beside):
    run, link, own_file = beside(".writing-old")
    with _refused(link):
        ingest([run], link.parent)
    assert own_file.exists()


@pytest.mark.slow
def test_foreign_link_and_its_target_stay(beside):
    run, link, own_file = beside("own")
    ingest([run], link.parent)
    assert link.is_symlink()
    assert own_file.exists()


@pytest.mark.slow
def test_the_tables_folder_itself_may_be_behind_a_link(tmp_path, traces):
    run = traces.request(1, 0, step=1).write(tmp_path / "run")
    (tmp_path / "disk").mkdir()
    (tmp_path / "tables").symlink_to(tmp_path / "disk")
    ingest([run], tmp_path / "tables")
    ingest([run], tmp_path / "tables")
    assert TableStore(tmp_path / "tables").runs() == ["run"]
