//! What Python pulls and pushes of tables and tensors, as it gives it and as the client takes it.
//!
//! Not here: sending it (`connection`, `worker`).

use evershard::{Error, PullPart, PushPart};
use numpy::{PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;

use crate::table_handle::TableHandle;
use crate::tensor_handle::TensorHandle;

pub(crate) type Ids<'py> = PyReadonlyArray1<'py, u64>;
pub(crate) type Floats<'py> = PyReadonlyArray1<'py, f32>;
pub(crate) type Rows<'py> = Bound<'py, PyArray1<f32>>;

/// Rows of a tensor: the first one, and the one behind the last.
pub(crate) type Span = (u64, u64);

/// One table's or tensor's part of a push.
#[derive(FromPyObject)]
pub(crate) enum OwnedPush<'py> {
    /// A table, ids, gradients.
    Rows(Py<TableHandle>, Ids<'py>, Floats<'py>),
    /// A tensor, rows, their gradient.
    Tensor(Py<TensorHandle>, Span, Floats<'py>),
}

impl OwnedPush<'_> {
    fn part(&self) -> PyResult<PushPart<'_>> {
        Ok(match self {
            OwnedPush::Rows(table, ids, gradients) => PushPart::Rows {
                table: table.get().table()?,
                ids: ids.as_slice()?,
                gradients: gradients.as_slice()?,
            },
            OwnedPush::Tensor(tensor, span, gradient) => PushPart::TensorRows {
                tensor: tensor.get().tensor()?,
                rows: span.0..span.1,
                gradient: gradient.as_slice()?,
            },
        })
    }
}

/// The parts, borrowed from Python as long as the call lasts.
///
/// # Errors
/// An array that is not C-contiguous, or a forked child.
pub(crate) fn push_parts<'a>(items: &'a [OwnedPush<'_>]) -> PyResult<Vec<PushPart<'a>>> {
    items.iter().map(OwnedPush::part).collect()
}

/// What to pull of one table or tensor.
#[derive(FromPyObject)]
pub(crate) enum OwnedPull<'py> {
    /// A table, ids.
    Rows(Py<TableHandle>, Ids<'py>),
    /// A tensor, rows, and an array to read into, if there is one.
    Tensor(Py<TensorHandle>, Span, Option<Rows<'py>>),
}

impl<'py> OwnedPull<'py> {
    /// Where it is read to.
    ///
    /// # Errors
    /// Rows that the tensor does not have; a forked child.
    pub(crate) fn target(&self, py: Python<'py>) -> PyResult<Rows<'py>> {
        match self {
            OwnedPull::Rows(table, ids) => {
                Ok(PyArray1::zeros(py, ids.len()? * table.get().table()?.dim(), false))
            }
            OwnedPull::Tensor(_, _, Some(out)) => Ok(out.clone()),
            OwnedPull::Tensor(tensor, span, None) => {
                let elements = tensor.get().elements_of(py, *span)?;
                Ok(PyArray1::zeros(py, elements, false))
            }
        }
    }

    /// # Errors
    /// An array that is not C-contiguous, or a forked child.
    pub(crate) fn part<'a>(&'a self, out: &'a mut [f32]) -> PyResult<PullPart<'a>> {
        Ok(match self {
            OwnedPull::Rows(table, ids) => {
                PullPart::Rows { table: table.get().table()?, ids: ids.as_slice()?, out }
            }
            OwnedPull::Tensor(tensor, span, _) => {
                PullPart::TensorRows { tensor: tensor.get().tensor()?, rows: span.0..span.1, out }
            }
        })
    }
}

/// Rows that a tensor does not have, as the client would say it.
pub(crate) fn out_of_range(name: &str, why: impl std::fmt::Display) -> Error {
    let message = format!("tensor {name:?}: {why}");
    Error::Refused(evershard::Refusal { kind: evershard::ErrorKind::OutOfRange, message })
}
