//! A dense tensor: the handle that a worker holds.
//!
//! A tensor lies in blocks over all shards (`evershard_proto::tensor`); its users see elements in row-major order, and rows:
//! slices along the first dimension. Everything here is in f32, as the servers keep it, whatever the tensor's dtype: that says what
//! its users have it in, and who converts is whoever has it in something else.
//!
//! Invariants:
//! - blocks are whole: what a part of a tensor shares a block with is never changed by it. So an assignment begins and ends with
//!   a block, and so does a gradient, unless the optimizer leaves alone what has a gradient of zero;
//! - the padding of the last block is never seen and never sent but as zeros.
//!
//! `version.rs` is how current a copy of a tensor is; this file is everything else.
//!
//! Not here: several tensors and tables at once (`parts`).

mod version;

use std::borrow::Cow;
use std::ops::Range;

use evershard_proto::push_body::{Encoding, Operation};
use evershard_proto::tensor::TensorLayout;
use evershard_proto::v1::{ErrorKind, Optimizer, TableDefinition, TensorDtype, optimizer};

use crate::batch::get_row;
use crate::pull::{self, PullOptions, Pulled, Wanted};
use crate::push::{self, PushHandle, PushOptions, PushReceipt};
use crate::{Client, Error, Table};

pub use version::TensorVersion;

/// A dense tensor of a cluster; cheap to clone.
#[derive(Debug, Clone)]
pub struct Tensor {
    table: Table,
    layout: TensorLayout,
}

/// A part of a tensor as the rows of a table: block numbers and whole blocks.
#[derive(Debug)]
pub(crate) struct Blocks<'a> {
    pub(crate) ids: Vec<u64>,
    pub(crate) values: Cow<'a, [f32]>,
}

impl Tensor {
    /// # Errors
    /// [`Error::Refused`] when the table is no tensor.
    pub(crate) fn new(table: Table) -> Result<Self, Error> {
        let Some(tensor) = &table.definition().tensor else {
            let what = format!("{:?} is a sparse table, and no tensor", table.name());
            return Err(Error::invalid(what));
        };
        let layout = TensorLayout::new(&tensor.shape)
            .map_err(|error| Error::invalid(format!("tensor {:?}: {error}", table.name())))?;
        Ok(Tensor { table, layout })
    }

    /// As a table of blocks.
    pub(crate) fn table(&self) -> &Table {
        &self.table
    }

    /// The tensor's name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.table.name()
    }

    /// The tensor's permanent number.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.table.number()
    }

    /// Its sizes; none of a single value.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        self.definition().tensor.as_ref().map_or(&[], |tensor| &tensor.shape)
    }

    /// What its users have it in.
    #[must_use]
    pub fn dtype(&self) -> TensorDtype {
        self.definition().tensor.as_ref().map_or(TensorDtype::F32, |tensor| tensor.dtype())
    }

    /// How it is cut into blocks, and what its rows are.
    #[must_use]
    pub fn layout(&self) -> &TensorLayout {
        &self.layout
    }

    /// All elements.
    #[must_use]
    pub fn elements(&self) -> usize {
        // A tensor that does not fit the address space cannot be pulled either.
        usize::try_from(self.layout.elements()).unwrap_or(usize::MAX)
    }

    /// How it was defined when this handle was made.
    #[must_use]
    pub fn definition(&self) -> &TableDefinition {
        self.table.definition()
    }

    /// The client that this handle belongs to.
    #[must_use]
    pub fn client(&self) -> Client {
        self.table.client()
    }

    /// The same tensor; gradients pushed through this handle travel as `encoding`, unless a push says otherwise.
    #[must_use]
    pub fn with_encoding(self, encoding: Encoding) -> Self {
        Tensor { table: self.table.with_encoding(encoding), ..self }
    }

    /// How gradients that are pushed through this handle travel.
    #[must_use]
    pub fn encoding(&self) -> Encoding {
        self.table.encoding()
    }

    /// Gives the tensor other hyper-parameters: see [`Table::set_optimizer`].
    ///
    /// # Errors
    /// As [`Table::set_optimizer`].
    pub async fn set_optimizer(&self, optimizer: Optimizer) -> Result<Tensor, Error> {
        Ok(Tensor { table: self.table.set_optimizer(optimizer).await?, layout: self.layout })
    }

    /// Pulls the whole tensor. Never writes at the server.
    ///
    /// # Errors
    /// [`Error::Refused`], [`Error::Unavailable`].
    pub async fn pull(&self, out: &mut [f32]) -> Result<(), Error> {
        self.pull_elements(0..self.layout.elements(), None, out).await.map(|_| ())
    }

    /// The same, into a new vector.
    ///
    /// # Errors
    /// As [`Tensor::pull`].
    pub async fn pull_vec(&self) -> Result<Vec<f32>, Error> {
        let mut out = vec![0.0; self.elements()];
        self.pull(&mut out).await?;
        Ok(out)
    }

    /// Pulls some rows. Only blocks that hold something of them travel.
    ///
    /// # Errors
    /// As [`Tensor::pull`]; OUT_OF_RANGE for rows that the tensor does not have.
    pub async fn pull_rows(&self, rows: Range<u64>, out: &mut [f32]) -> Result<(), Error> {
        self.pull_elements(self.elements_of(&rows)?, None, out).await.map(|_| ())
    }

    /// Brings `out`, which holds the tensor as of `version`, up to date: only blocks that were changed since travel. Without a
    /// version, or when it means nothing to the shards any more, everything does. When it fails, some blocks in `out` may be newer
    /// already, and `version` is still right.
    ///
    /// # Errors
    /// As [`Tensor::pull`].
    pub async fn pull_if_newer(
        &self,
        version: Option<&TensorVersion>,
        out: &mut [f32],
    ) -> Result<TensorVersion, Error> {
        let inner = &self.table.inner;
        let deadline = Client::deadline(inner);
        // A round that an unsafe recovery came into says nothing: indexes of the history that it gave up may be used again.
        loop {
            let epoch = inner.routing.recovery_epoch();
            let routing = inner.routing.table(deadline).await?;
            let since = version.filter(|version| version.is_of(self.number(), epoch, &routing));
            let newer_than = since.map(TensorVersion::indexes);
            let pulled = self.pull_elements(0..self.layout.elements(), newer_than.as_ref(), out).await?;
            if inner.routing.recovery_epoch() == epoch {
                return Ok(TensorVersion::new(self.number(), epoch, &routing, since, pulled));
            }
        }
    }

    /// Pushes the gradient of the whole tensor; returns when a quorum has it and it is applied, each block exactly once.
    ///
    /// # Errors
    /// [`Error::Refused`] (nothing changed), [`Error::PartialPush`] (its ids are numbers of blocks).
    pub async fn push(&self, gradient: &[f32]) -> Result<PushReceipt, Error> {
        self.push_begin(gradient, PushOptions::default()).await?.wait().await
    }

    /// Begins a push and does not wait.
    ///
    /// # Errors
    /// As [`Table::push_begin`].
    pub async fn push_begin(&self, gradient: &[f32], options: PushOptions) -> Result<PushHandle, Error> {
        self.push_rows_begin(0..self.layout.rows(), gradient, options).await
    }

    /// Pushes the gradient of some rows; blocks without any of them are left alone.
    ///
    /// # Errors
    /// As [`Tensor::push`]. INVALID when the rows share a block with others, unless the optimizer leaves alone what has a gradient
    /// of zero (SGD and Adagrad, without momentum and weight decay): see [`TensorLayout::aligned_rows`].
    pub async fn push_rows(&self, rows: Range<u64>, gradient: &[f32]) -> Result<PushReceipt, Error> {
        self.push_rows_begin(rows, gradient, PushOptions::default()).await?.wait().await
    }

    /// Begins such a push and does not wait.
    ///
    /// # Errors
    /// As [`Tensor::push_rows`].
    pub async fn push_rows_begin(
        &self,
        rows: Range<u64>,
        gradient: &[f32],
        options: PushOptions,
    ) -> Result<PushHandle, Error> {
        let blocks = self.gradient(&rows, gradient)?;
        let content = self.table.content(Operation::Gradient, &blocks.ids, &blocks.values, options);
        push::begin(&self.table.inner, &[content], options).await
    }

    /// Sets the whole tensor; optimizer state is kept. Blocks change one by one: whoever pulls meanwhile may see some of them.
    ///
    /// # Errors
    /// As [`Tensor::push`].
    pub async fn assign(&self, values: &[f32]) -> Result<PushReceipt, Error> {
        self.assign_rows(0..self.layout.rows(), values).await
    }

    /// Sets some rows.
    ///
    /// # Errors
    /// As [`Tensor::push`]. INVALID when the rows share a block with others: see [`TensorLayout::aligned_rows`].
    pub async fn assign_rows(&self, rows: Range<u64>, values: &[f32]) -> Result<PushReceipt, Error> {
        self.require_whole_blocks(&rows, "assigned")?;
        self.store(Operation::Set, &rows, values).await
    }

    /// Adds to the whole tensor, past the optimizer.
    ///
    /// # Errors
    /// As [`Tensor::push`].
    pub async fn add(&self, values: &[f32]) -> Result<PushReceipt, Error> {
        self.add_rows(0..self.layout.rows(), values).await
    }

    /// Adds to some rows, whichever: others in their blocks get nothing added.
    ///
    /// # Errors
    /// As [`Tensor::push`].
    pub async fn add_rows(&self, rows: Range<u64>, values: &[f32]) -> Result<PushReceipt, Error> {
        self.store(Operation::Add, &rows, values).await
    }

    async fn store(
        &self,
        operation: Operation,
        rows: &Range<u64>,
        values: &[f32],
    ) -> Result<PushReceipt, Error> {
        let (blocks, options) = (self.blocks(rows, values)?, PushOptions::default());
        let content = self.table.content(operation, &blocks.ids, &blocks.values, options);
        push::begin(&self.table.inner, &[content], options).await?.wait().await
    }

    /// A gradient as blocks, if it can be pushed.
    pub(crate) fn gradient<'a>(&self, rows: &Range<u64>, gradient: &'a [f32]) -> Result<Blocks<'a>, Error> {
        if !self.definition().optimizer.as_ref().is_some_and(leaves_zeros_alone) {
            self.require_whole_blocks(rows, "pushed (with this optimizer)")?;
        }
        self.blocks(rows, gradient)
    }

    fn require_whole_blocks(&self, rows: &Range<u64>, what: &str) -> Result<(), Error> {
        if self.layout.is_whole_blocks(&self.elements_of(rows)?) {
            return Ok(());
        }
        Err(Error::invalid(format!(
            "tensor {:?}: rows {} to {} share a block with others, and only whole blocks can be {what}: {} rows at a time, or to \
             the end",
            self.name(),
            rows.start,
            rows.end,
            self.layout.aligned_rows()
        )))
    }

    /// Elements of rows, with zeros for what else is in their blocks.
    fn blocks<'a>(&self, rows: &Range<u64>, values: &'a [f32]) -> Result<Blocks<'a>, Error> {
        let elements = self.elements_of(rows)?;
        self.check_length(&elements, values.len())?;
        let ids: Vec<u64> = self.layout.blocks_of(&elements).collect();
        let dim = self.layout.dim() as usize;
        if ids.len() * dim == values.len() {
            return Ok(Blocks { ids, values: Cow::Borrowed(values) });
        }
        // Fits: below `dim`.
        let before = (elements.start % u64::from(self.layout.dim())) as usize;
        let mut padded = vec![0.0; ids.len() * dim];
        padded[before..before + values.len()].copy_from_slice(values);
        Ok(Blocks { ids, values: Cow::Owned(padded) })
    }

    fn check_length(&self, elements: &Range<u64>, length: usize) -> Result<(), Error> {
        let expected = elements.end - elements.start;
        if length as u64 == expected {
            return Ok(());
        }
        let what = format!("tensor {:?}: {expected} values are needed, {length} were given", self.name());
        Err(Error::refused(ErrorKind::LengthMismatch, what))
    }

    /// # Errors
    /// OUT_OF_RANGE.
    pub(crate) fn elements_of(&self, rows: &Range<u64>) -> Result<Range<u64>, Error> {
        self.layout.elements_of(rows).map_err(|error| {
            Error::refused(ErrorKind::OutOfRange, format!("tensor {:?}: {error}", self.name()))
        })
    }

    /// Pulls elements; of groups in `newer_than` only blocks that were changed since.
    async fn pull_elements(
        &self,
        elements: Range<u64>,
        newer_than: Option<&std::collections::BTreeMap<u64, u64>>,
        out: &mut [f32],
    ) -> Result<Pulled, Error> {
        self.check_length(&elements, out.len())?;
        let ids: Vec<u64> = self.layout.blocks_of(&elements).collect();
        let dim = u64::from(self.layout.dim());
        let wanted = Wanted { table: self.number(), dim: self.table.dim(), ids: &ids, newer_than };
        pull::pull_each(&self.table.inner, wanted, PullOptions::default(), |place, row| {
            let block = ids[place] * dim..(ids[place] + 1) * dim;
            let (start, end) = (block.start.max(elements.start), block.end.min(elements.end));
            // All fit: `out` has as many elements as are asked for.
            let from = ((start - block.start) * 4) as usize;
            let to = (start - elements.start) as usize..(end - elements.start) as usize;
            get_row(&mut out[to], &row[from..]);
        })
        .await
    }
}

/// Whether a gradient of zero changes nothing of an element: neither weight nor state.
fn leaves_zeros_alone(optimizer: &Optimizer) -> bool {
    let is_without_memory =
        matches!(optimizer.kind, Some(optimizer::Kind::Sgd(_) | optimizer::Kind::Adagrad(_)));
    is_without_memory && optimizer.weight_decay == 0.0
}
