//! `evershard dev` and `evershardctl`, as scripts use them: layout, `ready`, exit codes and the stable JSON shapes.

mod support;

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use support::trainer::Trainer;
use support::{PATIENCE, ports};
use tempfile::TempDir;

/// A running `evershard dev`, killed with the test.
struct Dev {
    child: Child,
    dir: TempDir,
}

impl Dev {
    fn start(dir: TempDir, flags: &[&str]) -> Self {
        let mut command = evershard();
        command.arg("dev").arg("--dir").arg(dir.path()).args(flags).stdout(Stdio::piped());
        // SAFETY: prctl takes a signal number by value and is async-signal-safe.
        unsafe {
            command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n", "{:?}", child.try_wait());
        Dev { child, dir }
    }

    /// A cluster of three nodes and two shards.
    fn small() -> Self {
        let port = six_ports_in_a_row().to_string();
        let dir = tempfile::Builder::new().prefix("evershard-dev-").tempdir().unwrap();
        Self::start(
            dir,
            &[
                "--shards",
                "2",
                "--base-port",
                &port,
                "--",
                "--heartbeat-ms",
                "100",
                "--election-min-ms",
                "600",
                "--election-max-ms",
                "1200",
            ],
        )
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn endpoints(&self) -> String {
        let text = std::fs::read_to_string(self.path().join("endpoints")).unwrap();
        text.strip_suffix('\n').expect("one line").to_owned()
    }

    fn pid(&self, node: u64) -> Option<i32> {
        let text = std::fs::read_to_string(self.path().join(format!("node-{node}/pid"))).ok()?;
        Some(text.trim().parse().unwrap())
    }

    fn dev(&self, words: &[&str]) -> Output {
        evershard().arg("dev").arg("--dir").arg(self.path()).args(words).output().unwrap()
    }

    fn ctl(&self, words: &[&str]) -> Output {
        Command::new(ctl_binary()).args(["--endpoints", &self.endpoints()]).args(words).output().unwrap()
    }

    fn json(&self, words: &[&str]) -> Value {
        let output = self.ctl(&[words, &["--output", "json"]].concat());
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

impl Drop for Dev {
    fn drop(&mut self) {
        // Over already is just as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn evershard() -> Command {
    Command::new(env!("CARGO_BIN_EXE_evershard"))
}

/// `evershardctl` of the same build. A run of this package alone does not build it: then it is built here.
fn ctl_binary() -> PathBuf {
    let binary = Path::new(env!("CARGO_BIN_EXE_evershard")).with_file_name("evershardctl");
    if !binary.exists() {
        let built =
            Command::new(env!("CARGO")).args(["build", "--quiet", "-p", "evershardctl"]).status().unwrap();
        assert!(built.success() && binary.exists(), "cannot build {}", binary.display());
    }
    binary
}

fn six_ports_in_a_row() -> u16 {
    loop {
        let first = ports::free(1)[0];
        if (first..first + 6).all(|port| std::net::TcpListener::bind(("127.0.0.1", port)).is_ok()) {
            return first;
        }
    }
}

fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn exists(pid: i32) -> bool {
    // A zombie is dead, whoever has to reap it.
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_node_stays_dead_until_it_is_started() {
    let dev = Dev::small();
    for node in 1..=3 {
        for name in ["pid", "log", "data"] {
            assert!(dev.path().join(format!("node-{node}/{name}")).exists(), "node-{node}/{name}");
        }
    }
    assert_eq!(dev.endpoints().split(',').count(), 3);

    let pid = dev.pid(2).unwrap();
    let killed = Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
    assert!(killed.success());
    wait_for("the pid file goes with the process", || dev.pid(2).is_none());
    let status = dev.json(&["status", "--no-digest"]);
    assert_eq!(status["nodes"][1]["state"], "down", "{status}");

    let started = dev.dev(&["start-node", "2"]);
    assert!(started.status.success(), "{}", String::from_utf8_lossy(&started.stderr));
    assert_ne!(dev.pid(2).unwrap(), pid);
    let again = dev.dev(&["start-node", "2"]);
    assert_eq!(again.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&again.stderr).contains("node 2 runs already"));
    wait_for("node 2 is up again", || dev.json(&["status", "--no-digest"])["nodes"][1]["state"] == "up");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn children_die_with_their_parent_and_data_stay() {
    let mut dev = Dev::small();
    let trainer = Trainer::connect(&dev.endpoints()).await;
    trainer.integers("items", 2).await.push(&[1, 2], &[1.0, 1.0, 2.0, 2.0]).await.unwrap();
    let pids: Vec<i32> = (1..=3).map(|node| dev.pid(node).unwrap()).collect();
    // Not even the parent's own kill -9 leaves a child behind.
    dev.child.kill().unwrap();
    dev.child.wait().unwrap();
    wait_for("children die with their parent", || !pids.iter().any(|pid| exists(*pid)));

    let kept = std::mem::replace(&mut dev.dir, tempfile::tempdir().unwrap());
    let dev = Dev::start(kept, &[]);
    let trainer = Trainer::connect(&dev.endpoints()).await;
    assert_eq!(trainer.table("items").await.pull(&[1, 2]).await.unwrap(), [-1.0, -1.0, -2.0, -2.0]);
    let contradiction = dev.dev(&["--shards", "5"]);
    assert_eq!(contradiction.status.code(), Some(1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_port_in_use_is_named() {
    let port = six_ports_in_a_row();
    let _taken = std::net::TcpListener::bind(("127.0.0.1", port + 2)).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let output = evershard()
        .arg("dev")
        .arg("--dir")
        .arg(dir.path())
        .args(["--base-port", &port.to_string()])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(message.contains(&format!("port {} is in use", port + 2)), "{message}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_admin_tool_shows_a_real_cluster_in_its_stable_shapes() {
    let dev = Dev::small();
    let trainer = Trainer::connect(&dev.endpoints()).await;
    let table = trainer.integers("items", 4).await;
    let ids: Vec<u64> = (0..100).collect();
    table.push(&ids, &vec![1.0; 400]).await.unwrap();

    let status = dev.json(&["status"]);
    assert!(!status["cluster"]["id"].as_str().unwrap().is_empty());
    assert!(status["cluster"]["version"].is_string());
    assert_eq!(status["nodes"].as_array().unwrap().len(), 3);
    let shards = status["shards"].as_array().unwrap();
    assert_eq!(shards.len(), 2);
    assert_eq!(shards[0]["range_start"], 0);
    assert_eq!(shards[1]["range_end"], u64::MAX);
    assert_eq!(shards[0]["range_end"].as_u64().unwrap() + 1, shards[1]["range_start"].as_u64().unwrap());
    for shard in shards {
        assert!(shard["leader"].is_u64() && shard["term"].is_u64(), "{shard}");
        let replicas = shard["replicas"].as_array().unwrap();
        assert_eq!(replicas.len(), 3);
        assert_eq!(replicas.iter().filter(|replica| replica["role"] == "leader").count(), 1, "{shard}");
        for replica in replicas {
            for field in ["node", "last_index", "committed", "applied", "flushed"] {
                assert!(replica[field].is_u64(), "{field}: {replica}");
            }
            assert!(!replica["digest"].as_str().unwrap().is_empty(), "{replica}");
        }
    }
    let shown = &status["tables"][0];
    assert_eq!(
        (&shown["name"], &shown["kind"], &shown["dim"], &shown["rows"]),
        (&"items".into(), &"sparse".into(), &4.into(), &100.into())
    );

    let row = dev.json(&["table", "get", "items", "7"]);
    assert_eq!(row["exists"], true);
    assert_eq!(row["weights"], serde_json::json!([-1.0, -1.0, -1.0, -1.0]));
    let unseen = dev.json(&["table", "get", "items", "0xffffffffffffffff"]);
    assert_eq!((&unseen["exists"], &unseen["id"]), (&false.into(), &u64::MAX.into()));
    assert_eq!(dev.json(&["table", "show", "items"])["optimizer"]["kind"], "sgd");
    assert_eq!(dev.json(&["node", "list"])["nodes"][2]["id"], 3);
    assert_eq!(dev.json(&["shard", "list"])["shards"][1]["id"], 1);

    let scrub = dev.json(&["scrub"]);
    for shard in scrub["shards"].as_array().unwrap() {
        assert_eq!(shard["equal"], true);
        assert!(shard["index"].is_u64());
        let digests = shard["digests"].as_object().unwrap();
        assert_eq!(digests.keys().collect::<Vec<_>>(), ["1", "2", "3"]);
    }

    let leader = status["shards"][0]["leader"].as_u64().unwrap();
    let other = leader % 3 + 1;
    let moved = dev.json(&["shard", "transfer-leader", "0", "--to", &other.to_string()]);
    assert_eq!(moved["leader"], other);
    wait_for("the leader is shown", || dev.json(&["shard", "list"])["shards"][0]["leader"] == other);
    let unknown = dev.ctl(&["table", "get", "nothing", "1"]);
    assert_eq!(unknown.status.code(), Some(1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_answers_is_exit_code_3() {
    let port = ports::free(1)[0];
    let endpoint = format!("http://127.0.0.1:{port}");
    let output = Command::new(ctl_binary())
        .args(["--endpoints", &endpoint, "--timeout", "1", "status"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&output.stderr).contains(&endpoint));
}
