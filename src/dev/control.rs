//! Commands to one node of a development cluster: through the living parent, so that it stays the parent; without one,
//! directly.
//!
//! The parent listens on the unix socket `D/control`: one line a request (`start 2`, `stop 2`, `kill 2`), one line back
//! (`ok ...` or `error ...`). The socket is reached through `/proc/self/fd`, because a socket's path may have at most
//! 107 bytes and a directory's name may not care.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, oneshot};

use super::DevError;
use super::layout::{Layout, Settings};
use super::node_process::{self, Tie};

const LINE_BYTES_MAX: u64 = 256;
const REPLY_MAX: Duration = Duration::from_secs(30);
const END_MAX: Duration = Duration::from_secs(20);

/// How to end a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Signal {
    /// SIGTERM: it hands its leaderships over.
    Stop,
    /// SIGKILL.
    Kill,
}

impl Signal {
    pub(crate) fn number(self) -> i32 {
        match self {
            Signal::Stop => libc::SIGTERM,
            Signal::Kill => libc::SIGKILL,
        }
    }

    fn word(self) -> &'static str {
        match self {
            Signal::Stop => "stop",
            Signal::Kill => "kill",
        }
    }
}

/// What the parent is asked to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    Start(u64),
    Signal(u64, Signal),
}

/// An order and where its answer goes.
pub(crate) type Request = (Order, oneshot::Sender<Result<String, String>>);

/// Listens for orders until the process ends.
pub(crate) fn listen(layout: &Layout, orders: mpsc::Sender<Request>) -> Result<(), DevError> {
    let error = |source| DevError::File { action: "listen on", path: layout.control(), source };
    // The lock is ours, so a socket left here is a dead parent's.
    match std::fs::remove_file(layout.control()) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => return Err(error(source)),
        _ => {}
    }
    let directory = File::open(layout.dir()).map_err(error)?;
    let listener = UnixListener::bind(short_path(&directory)).map_err(error)?;
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream, orders.clone()));
        }
    });
    Ok(())
}

/// The path of the socket in an open directory, short whatever the directory's name.
fn short_path(directory: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}/control", directory.as_raw_fd()))
}

async fn serve(stream: UnixStream, orders: mpsc::Sender<Request>) -> io::Result<()> {
    let (reader, mut writer) = stream.into_split();
    let mut line = String::new();
    BufReader::new(tokio::io::AsyncReadExt::take(reader, LINE_BYTES_MAX)).read_line(&mut line).await?;
    let answer = match parse(line.trim()) {
        None => Err(format!("not an order: {:?}", line.trim())),
        Some(order) => {
            let (answer, answered) = oneshot::channel();
            let sent = orders.send((order, answer)).await.is_ok();
            if sent { answered.await.unwrap_or_else(|_| ending()) } else { ending() }
        }
    };
    let reply = match answer {
        Ok(text) => format!("ok {text}\n"),
        Err(text) => format!("error {text}\n"),
    };
    writer.write_all(reply.as_bytes()).await
}

fn ending() -> Result<String, String> {
    Err("the cluster is ending".to_owned())
}

fn parse(line: &str) -> Option<Order> {
    let (word, id) = line.split_once(' ')?;
    let id = id.parse().ok()?;
    match word {
        "start" => Some(Order::Start(id)),
        "stop" => Some(Order::Signal(id, Signal::Stop)),
        "kill" => Some(Order::Signal(id, Signal::Kill)),
        _ => None,
    }
}

/// Asks the living parent; `None` when there is none.
async fn ask_parent(layout: &Layout, order: &str) -> Result<Option<String>, DevError> {
    let error = |source| DevError::File { action: "ask the parent through", path: layout.control(), source };
    let Ok(directory) = File::open(layout.dir()) else {
        return Err(DevError::NoCluster { dir: layout.dir().to_path_buf() });
    };
    let stream = match UnixStream::connect(short_path(&directory)).await {
        Ok(stream) => stream,
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
            return Ok(None);
        }
        Err(source) => return Err(error(source)),
    };
    let (reader, mut writer) = stream.into_split();
    writer.write_all(format!("{order}\n").as_bytes()).await.map_err(error)?;
    let mut line = String::new();
    tokio::time::timeout(REPLY_MAX, BufReader::new(reader).read_line(&mut line))
        .await
        .unwrap_or_else(|_| Err(io::Error::new(io::ErrorKind::TimedOut, "no answer in 30 s")))
        .map_err(error)?;
    match line.trim().split_once(' ') {
        Some(("ok", text)) => Ok(Some(text.to_owned())),
        Some(("error", text)) => Err(DevError::Refused { message: text.to_owned() }),
        _ => Err(error(io::Error::new(io::ErrorKind::UnexpectedEof, "the parent ended"))),
    }
}

/// `evershard dev --dir D start-node <id>`.
pub(crate) async fn start_node(layout: &Layout, node: u64) -> Result<(), DevError> {
    let settings = Settings::existing(layout)?;
    settings.check_node(node)?;
    if let Some(text) = ask_parent(layout, &format!("start {node}")).await? {
        eprintln!("{text}");
        return Ok(());
    }
    if let Some(pid) = living_pid(layout, node) {
        return Err(DevError::NodeState { node, state: format!("runs already (pid {pid})") });
    }
    let child = node_process::spawn(layout, &settings, node, Tie::Detached)?;
    eprintln!("node {node} started without a parent (pid {})", child.id().unwrap_or(0));
    Ok(())
}

/// `evershard dev --dir D stop-node <id>` and `kill-node <id>`.
pub(crate) async fn signal_node(layout: &Layout, node: u64, signal: Signal) -> Result<(), DevError> {
    let settings = Settings::existing(layout)?;
    settings.check_node(node)?;
    if let Some(text) = ask_parent(layout, &format!("{} {node}", signal.word())).await? {
        eprintln!("{text}");
        return wait_until(node, || !layout.pid(node).exists()).await;
    }
    let Some(pid) = living_pid(layout, node) else {
        return Err(DevError::NodeState { node, state: "does not run".to_owned() });
    };
    // SAFETY: kill(2) takes no pointers; `living_pid` saw that the process is a server of this directory.
    if unsafe { libc::kill(pid, signal.number()) } != 0 {
        return Err(DevError::NodeState {
            node,
            state: format!("cannot be signalled: {}", io::Error::last_os_error()),
        });
    }
    eprintln!("node {node} told to end (pid {pid})");
    wait_until(node, || living_pid(layout, node).is_none()).await
}

async fn wait_until(node: u64, gone: impl Fn() -> bool) -> Result<(), DevError> {
    let deadline = tokio::time::Instant::now() + END_MAX;
    while !gone() {
        if tokio::time::Instant::now() >= deadline {
            let state = format!("did not end within {} s", END_MAX.as_secs());
            return Err(DevError::NodeState { node, state });
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

/// The pid of a node without a parent, when that process is the server of this directory.
fn living_pid(layout: &Layout, node: u64) -> Option<i32> {
    let pid: i32 = std::fs::read_to_string(layout.pid(node)).ok()?.trim().parse().ok()?;
    let command = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let data = layout.data(node);
    let is_ours = command.split(|byte| *byte == 0).any(|word| word == data.as_os_str().as_encoded_bytes());
    is_ours.then_some(pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_one_word_and_a_node() {
        assert_eq!(parse("start 2"), Some(Order::Start(2)));
        assert_eq!(parse("kill 18446744073709551615"), Some(Order::Signal(u64::MAX, Signal::Kill)));
        for line in ["", "start", "start x", "start -1", "burn 2", "stop 1 2"] {
            assert_eq!(parse(line), None, "{line}");
        }
    }

    #[tokio::test]
    async fn an_order_reaches_the_parent_from_a_directory_with_a_long_name() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("d".repeat(120));
        std::fs::create_dir(&deep).unwrap();
        let layout = Layout::new(&deep).unwrap();
        assert_eq!(ask_parent(&layout, "start 1").await.unwrap(), None);

        let (orders, mut received) = mpsc::channel::<Request>(1);
        listen(&layout, orders).unwrap();
        tokio::spawn(async move {
            while let Some((order, answer)) = received.recv().await {
                let _ =
                    answer.send(if order == Order::Start(1) { Ok("done".into()) } else { Err("no".into()) });
            }
        });
        assert_eq!(ask_parent(&layout, "start 1").await.unwrap().as_deref(), Some("done"));
        let refused = ask_parent(&layout, "kill 1").await.unwrap_err();
        assert_eq!(refused.to_string(), "no");
        let nonsense = ask_parent(&layout, "burn 1").await.unwrap_err();
        assert!(nonsense.to_string().contains("not an order"));
    }
}
