//! The parent of a development cluster: starts the nodes, watches them, takes orders, ends them.
//!
//! Invariant: `D/node-<id>/pid` exists exactly while the parent takes the node for running; so a node can be started
//! as soon as its pid file is gone.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::control::{self, Order, Request};
use super::layout::{Layout, Settings};
use super::node_process::{Ended, NodeProcess, check_ports};
use super::{DevArgs, DevError, boot};

/// How long a node has to end by itself.
const GRACE: Duration = Duration::from_secs(10);
/// How long the news of a death may take.
const NEWS_MAX: Duration = Duration::from_millis(500);
const LOG_TAIL_BYTES: u64 = 4096;

/// Runs the cluster until SIGINT, SIGTERM, or (when asked for) the end of standard input.
pub(crate) async fn run(layout: Layout, args: &DevArgs) -> Result<(), DevError> {
    layout.create_dir(layout.dir())?;
    let _lock = lock(&layout)?;
    let settings = Settings::resolve(&layout, args)?;
    for node in settings.node_ids() {
        check_ports(&settings, node)?;
    }
    settings.save(&layout)?;
    layout.write(&layout.endpoints(), &(settings.addresses().join(",") + "\n"))?;

    let (ended_sender, ended) = mpsc::channel(64);
    let mut supervisor = Supervisor { layout, settings, running: BTreeMap::new(), ended_sender, ended };
    let parent = if args.end_with_stdin { Some(stdin_pipe()?) } else { None };
    let result = supervisor.run_to_signal(args.ready_timeout, parent).await;
    supervisor.end_all().await;
    // A dead parent's socket would only puzzle; gone already is just as good.
    let _ = std::fs::remove_file(supervisor.layout.control());
    result
}

/// Standard input as the pipe that somebody who asked for `--end-with-stdin` made it.
fn stdin_pipe() -> Result<pipe::Receiver, DevError> {
    let opened = std::io::stdin().as_fd().try_clone_to_owned().and_then(pipe::Receiver::from_owned_fd);
    opened.map_err(|source| DevError::File { action: "wait for", path: "/dev/stdin".into(), source })
}

/// Waits for the end of a pipe; what comes through it is nobody's business.
async fn wait_for_end(pipe: &mut pipe::Receiver) {
    let mut ignored = [0; 64];
    while !matches!(pipe.read(&mut ignored).await, Ok(0) | Err(_)) {}
}

/// Held as long as the file is open.
fn lock(layout: &Layout) -> Result<File, DevError> {
    let path = layout.lock();
    let file = File::create(&path).map_err(|source| DevError::File { action: "create", path, source })?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => Err(DevError::Running { dir: layout.dir().to_path_buf() }),
        Err(std::fs::TryLockError::Error(source)) => {
            Err(DevError::File { action: "lock", path: layout.lock(), source })
        }
    }
}

struct Supervisor {
    layout: Layout,
    settings: Settings,
    running: BTreeMap<u64, NodeProcess>,
    ended_sender: mpsc::Sender<Ended>,
    ended: mpsc::Receiver<Ended>,
}

impl Supervisor {
    async fn run_to_signal(
        &mut self,
        ready_timeout: u64,
        mut parent: Option<pipe::Receiver>,
    ) -> Result<(), DevError> {
        let signals = |kind| {
            signal(kind).map_err(|source| DevError::File {
                action: "watch signals in",
                path: "/proc/self".into(),
                source,
            })
        };
        let mut interrupt = signals(SignalKind::interrupt())?;
        let mut terminate = signals(SignalKind::terminate())?;
        let (orders_sender, mut orders) = mpsc::channel::<Request>(16);
        for node in self.settings.node_ids() {
            self.start(node)?;
        }
        control::listen(&self.layout, orders_sender)?;
        let mut booting =
            Some(tokio::spawn(boot::boot(self.layout.clone(), self.settings.clone(), ready_timeout)));
        loop {
            tokio::select! {
                _ = interrupt.recv() => return Ok(()),
                _ = terminate.recv() => return Ok(()),
                () = async { wait_for_end(parent.as_mut().expect("polled only when Some")).await }, if parent.is_some() => {
                    eprintln!("evershard: standard input ended, and so does the cluster");
                    return Ok(());
                }
                Some((order, answer)) = orders.recv() => {
                    // Whoever asked may be gone.
                    let _ = answer.send(self.obey(order).await);
                }
                Some(ended) = self.ended.recv() => {
                    self.forget(ended.node);
                    eprintln!("evershard: node {} ended ({})", ended.node, ended.status);
                    // A node that gives up tells why in its log; one that was killed is somebody's experiment.
                    if booting.is_some() && ended.status.signal().is_none() {
                        return Err(self.ended_early(ended));
                    }
                }
                booted = async { booting.as_mut().expect("polled only when Some").await }, if booting.is_some() => {
                    booting = None;
                    match booted {
                        Ok(result) => result?,
                        Err(error) => return Err(DevError::Invalid { what: format!("starting failed: {error}") }),
                    }
                    self.settings.created = true;
                    say_ready();
                    eprintln!(
                        "evershard: {} nodes, {} shards, {} replicas each, durability {}; endpoints: {}",
                        self.settings.nodes,
                        self.settings.shards,
                        self.settings.replicas,
                        self.settings.durability_flag(),
                        self.settings.addresses().join(",")
                    );
                }
            }
        }
    }

    fn start(&mut self, node: u64) -> Result<u32, DevError> {
        let process = NodeProcess::start(&self.layout, &self.settings, node, self.ended_sender.clone())?;
        let pid = process.pid;
        self.running.insert(node, process);
        Ok(pid)
    }

    async fn obey(&mut self, order: Order) -> Result<String, String> {
        match order {
            Order::Start(node) => {
                self.let_die(node).await;
                if let Some(process) = self.running.get(&node) {
                    return Err(format!("node {node} runs already (pid {})", process.pid));
                }
                self.settings.check_node(node).map_err(|error| error.to_string())?;
                let pid = self.start(node).map_err(|error| error.to_string())?;
                Ok(format!("node {node} started (pid {pid})"))
            }
            Order::Signal(node, signal) => {
                let process = self.running.get(&node).ok_or_else(|| format!("node {node} does not run"))?;
                process.signal(signal.number()).await;
                Ok(format!("node {node} told to end (pid {})", process.pid))
            }
        }
    }

    /// Whoever starts a node right after `kill -9` is faster than the news of its death.
    async fn let_die(&mut self, node: u64) {
        while self.running.contains_key(&node) {
            match timeout(NEWS_MAX, self.ended.recv()).await {
                Ok(Some(ended)) => self.forget(ended.node),
                _ => return,
            }
        }
    }

    /// Ends all nodes: together, cleanly if they can within the grace, by force otherwise.
    async fn end_all(&mut self) {
        for process in self.running.values() {
            process.signal(libc::SIGTERM).await;
        }
        if timeout(GRACE, self.all_ended()).await.is_ok() {
            return;
        }
        for (node, process) in &self.running {
            eprintln!("evershard: node {node} did not end within {} s: killed", GRACE.as_secs());
            process.signal(libc::SIGKILL).await;
        }
        // SIGKILL cannot be refused; a process stuck in the kernel is not waited for.
        let _ = timeout(GRACE, self.all_ended()).await;
    }

    async fn all_ended(&mut self) {
        while !self.running.is_empty() {
            match self.ended.recv().await {
                Some(ended) => self.forget(ended.node),
                None => return,
            }
        }
    }

    /// A node's process is gone: nobody may kill a stranger by its pid file.
    fn forget(&mut self, node: u64) {
        self.running.remove(&node);
        // Gone already is just as good.
        let _ = std::fs::remove_file(self.layout.pid(node));
    }

    fn ended_early(&self, ended: Ended) -> DevError {
        let log = self.layout.log(ended.node);
        let tail = tail(&log).unwrap_or_else(|error| format!("(not readable: {error})"));
        DevError::NodeEnded { node: ended.node, status: ended.status, log, tail }
    }
}

/// Tells scripts, in one line, that the cluster can be used.
fn say_ready() {
    let mut out = std::io::stdout().lock();
    // A closed stdout only means that nobody waits for the word.
    let _ = writeln!(out, "ready").and_then(|()| out.flush());
}

/// The last lines of a log.
fn tail(path: &Path) -> std::io::Result<String> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(LOG_TAIL_BYTES)))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    Ok(lines[lines.len().saturating_sub(12)..].join("\n"))
}
