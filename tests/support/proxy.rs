//! A TCP proxy before one node: passes, delays, swallows replies, cuts.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::sleep;

/// What happens to the bytes. Changes reach living connections at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Both ways, at once.
    Pass,
    /// Both ways, this much later.
    Delay(Duration),
    /// Requests reach the node, its replies reach nobody. A connection that lost bytes ends when the mode changes.
    SwallowReplies,
    /// Living connections end, new ones are refused.
    Cut,
}

/// Listens on a port of its own for one node.
#[derive(Debug)]
pub(crate) struct Proxy {
    mode: watch::Sender<Mode>,
    swallowed: Arc<AtomicU64>,
}

impl Proxy {
    pub(crate) async fn start(port: u16, node_port: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
        let (mode, seen) = watch::channel(Mode::Pass);
        let swallowed = Arc::new(AtomicU64::new(0));
        let counter = swallowed.clone();
        tokio::spawn(async move {
            while let Ok((outside, _)) = listener.accept().await {
                tokio::spawn(serve(outside, node_port, seen.clone(), counter.clone()));
            }
        });
        Proxy { mode, swallowed }
    }

    pub(crate) fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }

    /// Bytes of replies that nobody got.
    pub(crate) fn swallowed(&self) -> u64 {
        self.swallowed.load(Ordering::SeqCst)
    }
}

/// One connection; it ends with either side.
async fn serve(outside: TcpStream, node_port: u16, mode: watch::Receiver<Mode>, swallowed: Arc<AtomicU64>) {
    if *mode.borrow() == Mode::Cut {
        return;
    }
    let Ok(inside) = TcpStream::connect(("127.0.0.1", node_port)).await else { return };
    // Small frames of gRPC must not wait for each other.
    let _ = (outside.set_nodelay(true), inside.set_nodelay(true));
    let (outside_read, outside_write) = outside.into_split();
    let (inside_read, inside_write) = inside.into_split();
    tokio::select! {
        () = pump(outside_read, inside_write, mode.clone(), None) => {}
        () = pump(inside_read, outside_write, mode, Some(swallowed)) => {}
    }
}

/// One direction. `replies` is given for the direction from the node.
async fn pump(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut mode: watch::Receiver<Mode>,
    replies: Option<Arc<AtomicU64>>,
) {
    let mut buffer = vec![0; 64 * 1024];
    let mut torn = false;
    loop {
        let read = tokio::select! {
            changed = mode.changed() => {
                let now = *mode.borrow_and_update();
                if changed.is_err() || now == Mode::Cut || (torn && now != Mode::SwallowReplies) {
                    return;
                }
                continue;
            }
            read = from.read(&mut buffer) => read,
        };
        let Ok(length @ 1..) = read else { return };
        let now = *mode.borrow();
        match (now, &replies) {
            (Mode::Cut, _) => return,
            (Mode::SwallowReplies, Some(swallowed)) => {
                torn = true;
                swallowed.fetch_add(length as u64, Ordering::SeqCst);
                continue;
            }
            (Mode::Delay(time), _) => sleep(time).await,
            (Mode::Pass | Mode::SwallowReplies, _) => {}
        }
        // Bytes were lost before these: the stream has no meaning any more.
        if torn || to.write_all(&buffer[..length]).await.is_err() {
            return;
        }
    }
}
