//! What one client is sent on its stream, and what becomes of it when the client does not take it.
//!
//! A reply holds a part of what the node may hold for clients until the transport takes it. A client that is alive and
//! takes nothing would keep that from everybody else, for ever: so its stream ends when it has let replies lie for too
//! long. It may open another, and send again what it was not answered.
//!
//! Not here: what a request costs, and who answers it (`exchange`).

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use evershard_proto::v1::{ErrorKind, ExchangeReply};
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio_stream::Stream;
use tonic::Status;

use super::RequestError;

/// Replies waiting for the client to take them.
const REPLIES_MAX: usize = 256;
/// Looks at a client within its patience.
const LOOKS: u32 = 8;

/// A request's part of its stream's bound and of the node's.
pub(super) type Permits = (OwnedSemaphorePermit, OwnedSemaphorePermit);

/// A reply, and what it holds until it is taken.
pub(super) type Held = (ExchangeReply, Permits);

/// What the client receives. What a reply takes of the bounds is given back when the transport takes the reply.
#[derive(Debug)]
pub struct Replies(Arc<Queue>);

#[derive(Debug)]
struct Queue {
    waiting: Mutex<mpsc::Receiver<Held>>,
    taken: AtomicU64,
    /// Why the stream ends before its requests do; told once.
    ended: Mutex<Option<Status>>,
}

/// Sees to it that replies are taken.
#[derive(Debug)]
pub(super) struct ReplyWatch(Arc<Queue>);

/// Where replies go in, where they come out, and who watches.
pub(super) fn replies() -> (mpsc::Sender<Held>, Replies, ReplyWatch) {
    let (sender, receiver) = mpsc::channel(REPLIES_MAX);
    let queue =
        Arc::new(Queue { waiting: Mutex::new(receiver), taken: AtomicU64::new(0), ended: Mutex::new(None) });
    (sender, Replies(queue.clone()), ReplyWatch(queue))
}

impl Stream for Replies {
    type Item = Result<ExchangeReply, Status>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = self.0.waiting.lock().poll_recv(context);
        match next {
            Poll::Ready(Some((reply, _permits))) => {
                self.0.taken.fetch_add(1, Ordering::Relaxed);
                Poll::Ready(Some(Ok(reply)))
            }
            Poll::Ready(None) => Poll::Ready(self.0.ended.lock().take().map(Err)),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl Drop for Replies {
    /// The client is gone: whoever answers learns it, and nothing is held for it any more.
    fn drop(&mut self) {
        self.0.let_go();
    }
}

impl ReplyWatch {
    /// Waits until the client has let replies lie for `patience` and taken none; by then nothing is held for it any more.
    pub(super) async fn stuck(&self, patience: Duration) {
        let (mut last, mut lain) = (0, 0);
        while lain < LOOKS {
            tokio::time::sleep(patience / LOOKS).await;
            let taken = self.0.taken.load(Ordering::Relaxed);
            let is_lying = taken == last && !self.0.waiting.lock().is_empty();
            lain = if is_lying { lain + 1 } else { 0 };
            last = taken;
        }
        let what = format!("replies were not taken for {} s: the stream ends", patience.as_secs());
        *self.0.ended.lock() = Some(RequestError::new(ErrorKind::Exhausted, what).retry_soon().into());
        self.0.let_go();
    }
}

impl Queue {
    fn let_go(&self) {
        let mut waiting = self.waiting.lock();
        waiting.close();
        while waiting.try_recv().is_ok() {}
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::Semaphore;
    use tokio_stream::StreamExt;
    use tonic::Code;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(1);

    async fn held(bound: &Arc<Semaphore>, id: u64) -> Held {
        let permit = || async { Arc::clone(bound).acquire_owned().await.unwrap() };
        (ExchangeReply { id, reply: None }, (permit().await, permit().await))
    }

    #[tokio::test]
    async fn a_client_that_takes_nothing_loses_its_stream_and_what_was_held_for_it() {
        let bound = Arc::new(Semaphore::new(100));
        let (sender, mut replies, watch) = replies();
        for id in 0..5 {
            sender.send(held(&bound, id).await).await.unwrap();
        }
        assert_eq!(bound.available_permits(), 90);
        watch.stuck(PATIENCE).await;
        assert_eq!(bound.available_permits(), 100);
        assert!(
            sender.send(held(&bound, 5).await).await.is_err(),
            "answers that come later have nowhere to go"
        );
        assert_eq!(bound.available_permits(), 100);
        let told = replies.next().await.unwrap().unwrap_err();
        assert_eq!(told.code(), Code::ResourceExhausted);
        assert!(replies.next().await.is_none());
    }

    #[tokio::test]
    async fn a_slow_client_and_one_with_nothing_to_take_keep_theirs() {
        let bound = Arc::new(Semaphore::new(100));
        let (sender, mut replies, watch) = replies();
        let watched = tokio::spawn(async move { watch.stuck(PATIENCE).await });
        tokio::time::sleep(PATIENCE * 3 / 2).await;
        for id in 0..8 {
            sender.send(held(&bound, id).await).await.unwrap();
        }
        for id in 0..8 {
            // Far from its end, also on a busy machine.
            tokio::time::sleep(PATIENCE / 10).await;
            assert_eq!(replies.next().await.unwrap().unwrap().id, id);
        }
        tokio::time::sleep(PATIENCE * 3 / 2).await;
        assert!(!watched.is_finished());
        drop(replies);
        assert_eq!(bound.available_permits(), 100);
    }

    #[tokio::test]
    async fn a_client_that_went_away_holds_nothing() {
        let bound = Arc::new(Semaphore::new(100));
        let (sender, replies, _watch) = replies();
        sender.send(held(&bound, 1).await).await.unwrap();
        drop(replies);
        assert_eq!(bound.available_permits(), 100);
        assert!(sender.is_closed());
    }
}
