//! The part of a definition that makes a table a dense tensor, checked.
//!
//! Not here: block arithmetic (`evershard_proto::tensor`), the rest of a definition (`schema`).

use evershard_proto::tensor::TensorLayout;
use evershard_proto::v1::{self, NonFinitePolicy, TableKind};

use super::SchemaError;
use crate::optimizer::{Optimizer, Rule};

/// The tensor's layout; `None` of a sparse table.
///
/// # Errors
/// [`SchemaError`], naming the field.
pub(super) fn layout_of(definition: &v1::TableDefinition) -> Result<Option<TensorLayout>, SchemaError> {
    let refused =
        |what: String| SchemaError::Tensor { table: definition.name.chars().take(128).collect(), what };
    let Some(tensor) = &definition.tensor else {
        // Of kind DENSE too: before there were tensors, such a table was made and used as a sparse one.
        return Ok(None);
    };
    if definition.kind() != TableKind::Dense {
        return Err(refused("a table with a shape is of kind DENSE".to_owned()));
    }
    if v1::TensorDtype::try_from(tensor.dtype).is_err() {
        return Err(SchemaError::Kind { table: definition.name.clone(), field: "dtype" });
    }
    let layout = TensorLayout::new(&tensor.shape).map_err(|error| refused(error.to_string()))?;
    if definition.dim != layout.dim() {
        let (dim, expected) = (definition.dim, layout.dim());
        return Err(refused(format!("its dim is {dim}; blocks of this shape have {expected} elements")));
    }
    if definition.non_finite() == NonFinitePolicy::SkipRow {
        let what = "non_finite is skip_row, which would train some blocks of the tensor and not others";
        return Err(refused(what.to_owned()));
    }
    Ok(Some(layout))
}

/// Whether an optimizer can train a dense tensor: one that is about rows would be about blocks, which mean nothing to its user.
///
/// # Errors
/// [`SchemaError`], naming the field.
pub(super) fn check_optimizer(table: &str, optimizer: &Optimizer) -> Result<(), SchemaError> {
    let refused = |what: &str| Err(SchemaError::Tensor { table: table.to_owned(), what: what.to_owned() });
    if let Rule::RowwiseAdagrad(_) = optimizer.rule {
        return refused("row-wise Adagrad is for the rows of sparse tables: take Adagrad");
    }
    if optimizer.clipping.norm != 0.0 {
        return refused(
            "clip_norm is for the rows of sparse tables: clip the norm of a tensor's gradient before it is pushed",
        );
    }
    Ok(())
}

/// Fan in and fan out of a shape, as `torch.nn.init` has them; `None` below two dimensions.
pub(super) fn fans(shape: &[u64]) -> Option<(u64, u64)> {
    let [out, into, field @ ..] = shape else { return None };
    let field = field.iter().product::<u64>();
    Some((into * field, out * field))
}
