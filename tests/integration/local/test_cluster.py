import pathlib
import sys

from tmover.cluster import JobSpec, LocalCluster, agent_argv


def spec(script: pathlib.Path, *arguments: str, nodes: int = 1, standby: int = 0, nproc: int = 1) -> JobSpec:
    argv = agent_argv(str(script), *arguments, nproc=nproc)
    return JobSpec(nodes=nodes, standby=standby, nproc=nproc, argv=argv, env={"PATH": "/bin:/usr/bin"}, cwd=script.parent)


def test_a_job_of_scripts_that_do_nothing_ends_well(cluster: LocalCluster, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("print('hello')")

    job = cluster.submit(spec(script, nodes=2, nproc=2))

    status = cluster.wait(job, lambda status: status.code is not None, timeout_s=30)
    assert status.code == 0, status
