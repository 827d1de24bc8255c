//! A node that must not start says why, with exit code 1, and changes nothing.

mod support;

use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use support::node::server;
use support::trainer::Trainer;
use support::{Cluster, Options, ports};

/// Runs a server that has to end by itself.
fn ends(command: &mut Command) -> Output {
    let output = command.stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    output
}

fn message(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A command for a node of its own that would start if nothing were wrong.
fn lonely(data: &Path) -> Command {
    let free = ports::free(2);
    let mut command = server();
    command
        .args(["--node-id", "1"])
        .args(["--listen", &format!("127.0.0.1:{}", free[0])])
        .args(["--http", &format!("127.0.0.1:{}", free[1])])
        .arg("--data")
        .arg(data);
    command
}

/// Names and bytes of all files.
fn content(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(content(&path));
        } else {
            found.push((path.display().to_string(), std::fs::read(&path).unwrap()));
        }
    }
    found.sort();
    found
}

#[test]
fn a_port_in_use_is_named_and_nothing_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    for flag in ["--listen", "--http"] {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap().to_string();
        let free = ports::free(2);
        let mut command = server();
        let other = if flag == "--listen" { "--http" } else { "--listen" };
        command.args([flag, &address, other, &format!("127.0.0.1:{}", free[0])]).arg("--data").arg(&data);
        let said = message(&ends(&mut command));
        assert!(said.contains(&address) && said.contains("in use"), "{said}");
        assert!(!data.exists(), "{} was made", data.display());
    }
}

#[test]
fn unknown_keys_and_senseless_values_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let file = dir.path().join("node.toml");
    for (toml, names) in [
        ("heartbeat_millis = 20\n", "heartbeat_millis"),
        ("heartbeat_ms = \"often\"\n", "heartbeat_ms"),
        ("heartbeat_ms = 0\n", "heartbeat_ms"),
        ("node_id = 0\n", "node_id"),
        ("log_segment_bytes = 1\n", "log_segment_bytes"),
        ("[log]\nsegment = 1\n", "log"),
        ("heartbeat_ms = \n", "node.toml"),
    ] {
        std::fs::write(&file, toml).unwrap();
        // Flags win over the file: `node_id` is left to it.
        let mut command = server();
        command.arg("--config").arg(&file).arg("--data").arg(&data);
        let said = message(&ends(&mut command));
        assert!(said.contains(names), "{toml:?}: {said}");
    }
    let absent = dir.path().join("absent.toml");
    let said = message(&ends(server().arg("--config").arg(&absent)));
    assert!(said.contains("absent.toml"), "{said}");
    for (variable, value) in [("EVERSHARD_HEARTBEET_MS", "20"), ("EVERSHARD_HEARTBEAT_MS", "often")] {
        let said = message(&ends(lonely(&data).env(variable, value)));
        assert!(said.to_lowercase().contains(&variable["EVERSHARD_".len()..].to_lowercase()), "{said}");
    }
    let said = message(&ends(server().args(["--listen", "0.0.0.0:7400"]).arg("--data").arg(&data)));
    assert!(said.contains("--insecure"), "{said}");
    assert!(!data.exists(), "{} was made", data.display());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_data_directory_of_another_cluster_or_node_is_refused_unread() {
    let mut cluster =
        Cluster::start(Options { nodes: 1, replicas: 1, shards: 1, ..Options::default() }).await;
    let trainer = Trainer::connect(&cluster.endpoints()).await;
    trainer.integers("items", 2).await.push(&[1], &[1.0, 1.0]).await.unwrap();
    cluster.kill(1);
    let data = cluster.node(1).data();
    let before = content(&data);

    let foreign = "00000000-0000-4000-8000-000000000000";
    let said = message(&ends(lonely(&data).args(["--cluster-id", foreign])));
    assert!(said.contains(foreign) && said.contains("belongs to cluster"), "{said}");
    let mut other_node = server();
    let free = ports::free(2);
    other_node
        .args(["--node-id", "9"])
        .args(["--listen", &format!("127.0.0.1:{}", free[0])])
        .args(["--http", &format!("127.0.0.1:{}", free[1])])
        .arg("--data")
        .arg(&data);
    let said = message(&ends(&mut other_node));
    assert!(said.contains("node 1") && said.contains("node 9"), "{said}");
    assert!(content(&data) == before, "a refused start changed the directory");

    cluster.restart(1);
    cluster.wait_ready().await;
    assert_eq!(trainer.table("items").await.pull(&[1]).await.unwrap(), [-1.0, -1.0]);

    // While it runs, a second process on the same directory is refused as well.
    let said = message(&ends(&mut lonely(&data)));
    assert!(said.contains("lock") || said.contains("in use"), "{said}");
    assert_eq!(trainer.table("items").await.pull(&[1]).await.unwrap(), [-1.0, -1.0]);
}

/// Two clusters that meet by mistake: neither takes the other's node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_of_another_cluster_is_not_taken_in() {
    let one = || Options { nodes: 1, replicas: 1, shards: 1, ..Options::default() };
    let mut first = Cluster::start(one()).await;
    let second = Cluster::start(one()).await;
    let trainer = Trainer::connect(&first.endpoints()).await;
    trainer.integers("items", 2).await.push(&[1], &[1.0, 1.0]).await.unwrap();
    let own = first.routing(1).await.unwrap().cluster_id;
    first.kill(1);
    first.node_mut(1).settings.peers = second.endpoints();
    first.restart(1);
    first.wait_ready().await;
    assert_eq!(first.routing(1).await.unwrap().cluster_id, own);
    assert_eq!(second.routing(1).await.unwrap().nodes.len(), 1);
    assert_eq!(trainer.table("items").await.pull(&[1]).await.unwrap(), [-1.0, -1.0]);
}
