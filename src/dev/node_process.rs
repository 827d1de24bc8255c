//! One server process of a development cluster.
//!
//! Invariant: a signal is sent only to a process that was not yet reaped, so never to a stranger that got its number.

use std::fs::OpenOptions;
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::process::CommandExt;
use std::process::{ExitStatus, Stdio};

use tokio::process::{Child, Command};
use tokio::sync::mpsc;

use super::DevError;
use super::layout::{Layout, Settings};

/// How long the life of a child is tied to ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tie {
    /// It dies with the thread that starts it.
    Parent,
    /// It stays: nobody watches it.
    Detached,
}

/// A node's process has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) node: u64,
    pub(crate) status: ExitStatus,
}

/// A running node: signals can be sent to it until it ended.
#[derive(Debug)]
pub(crate) struct NodeProcess {
    pub(crate) pid: u32,
    signals: mpsc::Sender<i32>,
}

impl NodeProcess {
    /// Starts the node and watches it; `ended` is told when it ends.
    pub(crate) fn start(
        layout: &Layout,
        settings: &Settings,
        node: u64,
        ended: mpsc::Sender<Ended>,
    ) -> Result<Self, DevError> {
        let mut child = spawn(layout, settings, node, Tie::Parent)?;
        let pid = child.id().unwrap_or(0);
        let (signals, mut wanted) = mpsc::channel::<i32>(4);
        tokio::spawn(async move {
            let status = loop {
                tokio::select! {
                    status = child.wait() => break status,
                    Some(signal) = wanted.recv() => send_signal(&child, signal),
                }
            };
            if let Ok(status) = status {
                let _ = ended.send(Ended { node, status }).await;
            }
        });
        Ok(NodeProcess { pid, signals })
    }

    /// Sends a signal, unless the process has ended.
    pub(crate) async fn signal(&self, signal: i32) {
        // A closed channel says that the process has ended.
        let _ = self.signals.send(signal).await;
    }
}

fn send_signal(child: &Child, signal: i32) {
    if let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok()) {
        // SAFETY: kill(2) takes no pointers; `id` is Some only before the child was reaped, so the number is its own.
        let _ = unsafe { libc::kill(pid, signal) };
    }
}

/// Fails, naming the port, when somebody listens where the node would.
pub(crate) fn check_ports(settings: &Settings, node: u64) -> Result<(), DevError> {
    for (port, purpose) in [(settings.grpc_port(node), "gRPC"), (settings.http_port(node), "HTTP")] {
        TcpListener::bind((Ipv4Addr::LOCALHOST, port)).map_err(|source| DevError::PortInUse {
            port,
            node,
            purpose,
            source,
        })?;
    }
    Ok(())
}

/// Starts the server process of `node` and writes its pid file.
pub(crate) fn spawn(layout: &Layout, settings: &Settings, node: u64, tie: Tie) -> Result<Child, DevError> {
    check_ports(settings, node)?;
    layout.create_dir(&layout.node(node))?;
    let log_path = layout.log(node);
    let open = || OpenOptions::new().create(true).append(true).open(&log_path);
    let log_error = |source| DevError::File { action: "open", path: layout.log(node), source };
    let log = open().map_err(log_error)?;
    let log_too = open().map_err(log_error)?;

    let program = std::env::current_exe().map_err(|source| DevError::Spawn { node, source })?;
    let mut command = std::process::Command::new(program);
    command
        .arg("server")
        .args(["--node-id", &node.to_string()])
        .args(["--listen", &format!("127.0.0.1:{}", settings.grpc_port(node))])
        .args(["--advertise", &settings.address(node)])
        .args(["--http", &format!("127.0.0.1:{}", settings.http_port(node))])
        .arg("--data")
        .arg(layout.data(node))
        .args(["--peers", &settings.addresses().join(",")])
        .args(["--durability", settings.durability_flag()])
        .args(&settings.server_args)
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(log_too)
        // A Ctrl-C on the terminal is for the parent: it ends the children in order.
        .process_group(0);
    if tie == Tie::Parent {
        let parent = std::process::id();
        // SAFETY: between fork and exec only async-signal-safe calls are made (prctl, getppid, _exit), and no memory
        // is taken.
        unsafe {
            command.pre_exec(move || die_with_parent(parent));
        }
    }
    let child = Command::from(command).spawn().map_err(|source| DevError::Spawn { node, source })?;
    layout.write(&layout.pid(node), &format!("{}\n", child.id().unwrap_or(0)))?;
    Ok(child)
}

/// Runs in the child: the kernel kills it when the thread that started it ends.
fn die_with_parent(parent: u32) -> std::io::Result<()> {
    // SAFETY: PR_SET_PDEATHSIG takes a signal number by value; getppid takes nothing; _exit does not return.
    unsafe {
        if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
            return Err(std::io::Error::last_os_error());
        }
        // The parent may have died before the line above.
        if u32::try_from(libc::getppid()) != Ok(parent) {
            libc::_exit(1);
        }
    }
    Ok(())
}
