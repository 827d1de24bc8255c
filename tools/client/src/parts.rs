//! Tables and tensors, several at once: what a model reads in a forward pass and pushes in a backward pass, in one round trip.
//!
//! Invariant: what is pushed together is checked together, before any of it is sent.
//!
//! Not here: what becomes of one of them (`table`, `tensor`).

use std::borrow::Cow;
use std::ops::Range;

use evershard_proto::push_body::Operation;

use crate::non_finite::Found;
use crate::push::{self, Content, PushHandle, PushOptions, PushReceipt};
use crate::{Client, Error, Table, Tensor, TensorVersion};

/// What to push to one table or tensor.
#[derive(Debug, Clone)]
pub enum PushPart<'a> {
    /// Gradients of rows: see [`Table::push`].
    Rows {
        /// The table.
        table: &'a Table,
        /// The rows' ids.
        ids: &'a [u64],
        /// `ids.len() x dim`.
        gradients: &'a [f32],
    },
    /// The gradient of a whole tensor: see [`Tensor::push`].
    Tensor {
        /// The tensor.
        tensor: &'a Tensor,
        /// An element each.
        gradient: &'a [f32],
    },
    /// The gradient of some rows of a tensor: see [`Tensor::push_rows`].
    TensorRows {
        /// The tensor.
        tensor: &'a Tensor,
        /// Which rows.
        rows: Range<u64>,
        /// An element each.
        gradient: &'a [f32],
    },
}

/// What to pull of one table or tensor.
#[derive(Debug)]
pub enum PullPart<'a> {
    /// Rows: see [`Table::pull`].
    Rows {
        /// The table.
        table: &'a Table,
        /// The rows' ids.
        ids: &'a [u64],
        /// `ids.len() x dim`.
        out: &'a mut [f32],
    },
    /// A whole tensor: see [`Tensor::pull`].
    Tensor {
        /// The tensor.
        tensor: &'a Tensor,
        /// An element each.
        out: &'a mut [f32],
    },
    /// Some rows of a tensor: see [`Tensor::pull_rows`].
    TensorRows {
        /// The tensor.
        tensor: &'a Tensor,
        /// Which rows.
        rows: Range<u64>,
        /// An element each.
        out: &'a mut [f32],
    },
    /// What changed of a tensor: see [`Tensor::pull_if_newer`].
    TensorIfNewer {
        /// The tensor.
        tensor: &'a Tensor,
        /// As of when `out` is; the version of now when the pull is over.
        version: &'a mut Option<TensorVersion>,
        /// An element each.
        out: &'a mut [f32],
    },
}

impl PullPart<'_> {
    async fn pull(&mut self) -> Result<(), Error> {
        match self {
            PullPart::Rows { table, ids, out } => table.pull(ids, out).await,
            PullPart::Tensor { tensor, out } => tensor.pull(out).await,
            PullPart::TensorRows { tensor, rows, out } => tensor.pull_rows(rows.clone(), out).await,
            PullPart::TensorIfNewer { tensor, version, out } => {
                let now = tensor.pull_if_newer(version.as_ref(), out).await?;
                **version = Some(now);
                Ok(())
            }
        }
    }
}

/// A part as a table's rows.
#[derive(Debug)]
pub(crate) struct Prepared<'a> {
    table: &'a Table,
    ids: Cow<'a, [u64]>,
    values: Cow<'a, [f32]>,
}

impl<'a> Prepared<'a> {
    /// # Errors
    /// What can be said of one part alone.
    pub(crate) fn new(part: &PushPart<'a>) -> Result<Self, Error> {
        let blocks = |tensor: &'a Tensor, rows: Range<u64>, gradient: &'a [f32]| {
            let blocks = tensor.gradient(&rows, gradient)?;
            Ok(Prepared { table: tensor.table(), ids: Cow::Owned(blocks.ids), values: blocks.values })
        };
        match part {
            PushPart::Rows { table, ids, gradients } => {
                Ok(Prepared { table, ids: Cow::Borrowed(ids), values: Cow::Borrowed(gradients) })
            }
            PushPart::Tensor { tensor, gradient } => blocks(tensor, 0..tensor.layout().rows(), gradient),
            PushPart::TensorRows { tensor, rows, gradient } => blocks(tensor, rows.clone(), gradient),
        }
    }

    /// All parts of a push.
    ///
    /// # Errors
    /// Of the first part that cannot be pushed.
    pub(crate) fn all(parts: &[PushPart<'a>]) -> Result<Vec<Self>, Error> {
        parts.iter().map(Prepared::new).collect()
    }

    pub(crate) fn content(&self, options: PushOptions) -> Content<'_> {
        self.table.content(Operation::Gradient, &self.ids, &self.values, options)
    }
}

impl Client {
    /// Begins a push to several tables and tensors at once: one message a shard where they fit.
    ///
    /// # Errors
    /// [`Error::Refused`] when a part cannot be pushed, or a table or tensor is given twice.
    pub async fn push_parts_begin(
        &self,
        parts: &[PushPart<'_>],
        options: PushOptions,
    ) -> Result<PushHandle, Error> {
        let prepared = Prepared::all(parts)?;
        let contents: Vec<Content<'_>> = prepared.iter().map(|part| part.content(options)).collect();
        push::begin(&self.inner, &contents, options).await
    }

    /// Checks, without sending anything, what [`Client::push_parts_begin`] would refuse.
    ///
    /// # Errors
    /// As that.
    pub fn check_push_parts(&self, parts: &[PushPart<'_>]) -> Result<(), Error> {
        let prepared = Prepared::all(parts)?;
        let contents: Vec<Content<'_>> =
            prepared.iter().map(|part| part.content(PushOptions::default())).collect();
        let mut found = Found::default();
        push::check(&contents, &mut found).inspect_err(|_| self.inner.reports.tell(found))
    }

    /// Pushes to several tables and tensors at once.
    ///
    /// # Errors
    /// As [`Table::push`] and [`Tensor::push`].
    pub async fn push_parts(&self, parts: &[PushPart<'_>]) -> Result<PushReceipt, Error> {
        self.push_parts_begin(parts, PushOptions::default()).await?.wait().await
    }

    /// Pulls from several tables and tensors at once.
    ///
    /// # Errors
    /// As [`Table::pull`] and [`Tensor::pull`].
    pub async fn pull_parts(&self, parts: &mut [PullPart<'_>]) -> Result<(), Error> {
        let all = parts.iter_mut().map(PullPart::pull);
        futures_util::future::try_join_all(all).await.map(|_| ())
    }
}
