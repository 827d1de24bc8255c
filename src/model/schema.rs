//! A table's definition, checked: everything after this point may rely on it.
//!
//! Invariants:
//! - a [`TableSchema`] exists only for a valid definition; nothing is repaired on the way;
//! - the shape of a table's rows never changes: weights (`dim`) and the optimizer's state, adjacent, and notes where the rules for
//!   rows need them; hyper-parameters may, under a growing version;
//! - the rows of a dense tensor are its blocks, and their ids are below [`TensorLayout::blocks`]; no rules make them come or go.

use evershard_proto::tensor::TensorLayout;
use evershard_proto::{limits, v1};
use evershard_storage::table::RowShape;

use super::RowRules;
use super::SchemaError;
use super::hyper_parameters::Checker;
use super::tensor_schema;
use crate::optimizer::{Distribution, Initializer, Optimizer};

/// What to do with a gradient or value that is not finite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NonFinite {
    /// The whole message is refused.
    Reject,
    /// Rows that hold one are left out, the others are applied.
    SkipRow,
    /// NaN becomes 0, an infinity the largest finite value of its sign.
    Clip,
}

/// A table as the server uses it.
#[derive(Debug, Clone, PartialEq)]
pub struct TableSchema {
    number: u32,
    /// How often the definition was changed.
    version: u64,
    definition: v1::TableDefinition,
    optimizer: Option<Optimizer>,
    initializer: Initializer,
    non_finite: NonFinite,
    rules: RowRules,
    tensor: Option<TensorLayout>,
}

impl TableSchema {
    /// Checks a definition, of version 0. `number` is the table's permanent number.
    ///
    /// # Errors
    /// [`SchemaError`], naming the field.
    pub fn new(number: u32, definition: &v1::TableDefinition) -> Result<Self, SchemaError> {
        check_name(&definition.name)?;
        let table = || definition.name.clone();
        let tensor = tensor_schema::layout_of(definition)?;
        if definition.dim == 0 || definition.dim > limits::DIM_MAX {
            return Err(SchemaError::Dim { table: table(), dim: definition.dim, limit: limits::DIM_MAX });
        }
        if v1::TableKind::try_from(definition.kind).is_err() {
            return Err(SchemaError::Kind { table: table(), field: "kind" });
        }
        let non_finite = match v1::NonFinitePolicy::try_from(definition.non_finite) {
            Ok(v1::NonFinitePolicy::Reject) => NonFinite::Reject,
            Ok(v1::NonFinitePolicy::SkipRow) => NonFinite::SkipRow,
            Ok(v1::NonFinitePolicy::Clip) => NonFinite::Clip,
            Err(_) => return Err(SchemaError::Kind { table: table(), field: "non_finite" }),
        };
        let check = Checker { table: &definition.name };
        let optimizer =
            definition.optimizer.as_ref().map(|optimizer| check.optimizer(optimizer)).transpose()?;
        if let (Some(_), Some(optimizer)) = (&tensor, &optimizer) {
            tensor_schema::check_optimizer(&definition.name, optimizer)?;
        }
        let shape = definition.tensor.as_ref().map(|tensor| tensor.shape.as_slice());
        let initializer = check.initializer(definition.initializer.as_ref(), definition.dim, shape)?;
        let rules = RowRules::new(definition)?;
        Ok(TableSchema {
            number,
            version: 0,
            definition: definition.clone(),
            optimizer,
            initializer,
            non_finite,
            rules,
            tensor,
        })
    }

    /// Checks the description a schema entry carries.
    ///
    /// # Errors
    /// [`SchemaError`], naming the field.
    pub fn from_description(description: &v1::TableDescription) -> Result<Self, SchemaError> {
        let definition =
            description.definition.as_ref().ok_or(SchemaError::Missing { number: description.number })?;
        let schema = Self::new(description.number, definition)?;
        Ok(TableSchema { version: description.definition_version, ..schema })
    }

    /// The table's permanent number.
    #[must_use]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// How often the definition was changed since the table was created. A higher one is never replaced by a lower one.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The table's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.definition.name
    }

    /// Values a row.
    #[must_use]
    pub fn dim(&self) -> u32 {
        self.definition.dim
    }

    /// Floats a row: weights, then optimizer state, then notes.
    #[must_use]
    pub fn shape(&self) -> RowShape {
        let state = self.optimizer.map_or(0, |optimizer| optimizer.state_floats(self.dim()));
        RowShape { dim: self.dim(), state, notes: self.rules.notes() }
    }

    /// How the table learns; `None` when it takes no gradients.
    #[must_use]
    pub fn optimizer(&self) -> Option<&Optimizer> {
        self.optimizer.as_ref()
    }

    /// The blocks of a dense tensor; `None` of a sparse table, of which every id is a row.
    #[must_use]
    pub fn tensor(&self) -> Option<&TensorLayout> {
        self.tensor.as_ref()
    }

    /// Writes the weights that a row has before its first push. What a tensor's last block has beyond its end is zero.
    pub fn fill_new_weights(&self, id: u64, weights: &mut [f32]) {
        self.initializer.fill(id, weights);
        if let Some(layout) = &self.tensor {
            let valid = layout.valid(id).min(weights.len());
            weights[valid..].fill(0.0);
        }
    }

    /// What to do with values that are not finite.
    #[must_use]
    pub fn non_finite(&self) -> NonFinite {
        self.non_finite
    }

    /// Which rows there are.
    #[must_use]
    pub fn rules(&self) -> &RowRules {
        &self.rules
    }

    /// The definition as it was given.
    #[must_use]
    pub fn definition(&self) -> &v1::TableDefinition {
        &self.definition
    }

    /// Number, definition and its version, as they travel.
    #[must_use]
    pub fn description(&self) -> v1::TableDescription {
        v1::TableDescription {
            number: self.number,
            definition: Some(self.definition.clone()),
            definition_version: self.version,
        }
    }

    /// True when both define the same table, whatever their numbers and versions: creating it again is then no conflict.
    #[must_use]
    pub fn same_definition(&self, other: &TableSchema) -> bool {
        self.optimizer == other.optimizer && self.same_but_for_optimizer(other)
    }

    /// True when the rows of one are rows of the other, to the meaning of every float: the definitions differ in numbers of
    /// the optimizer at most.
    #[must_use]
    pub fn differs_in_hyper_parameters_only(&self, other: &TableSchema) -> bool {
        let same_state = match (&self.optimizer, &other.optimizer) {
            (Some(own), Some(other)) => own.keeps_state_of(other),
            (own, other) => own.is_none() && other.is_none(),
        };
        same_state && self.same_but_for_optimizer(other)
    }

    /// An absent initialiser is zeros, and zeros have no use for a seed.
    fn same_but_for_optimizer(&self, other: &TableSchema) -> bool {
        let start = |schema: &TableSchema| match schema.initializer {
            Initializer { distribution: Distribution::Zeros, .. } => None,
            initializer => Some(initializer),
        };
        self.definition.name == other.definition.name
            && self.definition.kind == other.definition.kind
            && self.definition.dim == other.definition.dim
            && self.definition.tensor == other.definition.tensor
            && self.non_finite == other.non_finite
            && self.rules == other.rules
            && start(self) == start(other)
    }

    /// Writes a row as it is before its first push: initial weights, initial optimizer state.
    pub fn fill_new_row(&self, id: u64, weights: &mut [f32], state: &mut [f32]) {
        self.fill_new_weights(id, weights);
        if let Some(optimizer) = &self.optimizer {
            optimizer.initial_state(state);
        }
    }
}

fn check_name(name: &str) -> Result<(), SchemaError> {
    let reason = if name.is_empty() {
        "it is empty"
    } else if name.len() > limits::TABLE_NAME_BYTES_MAX {
        "it is longer than 128 bytes"
    } else if name.chars().any(char::is_control) {
        "it has control characters"
    } else if name.trim() != name {
        "it begins or ends with a blank"
    } else {
        return Ok(());
    };
    Err(SchemaError::Name { name: name.chars().take(limits::TABLE_NAME_BYTES_MAX).collect(), reason })
}

#[cfg(test)]
mod tests {
    use super::*;
    use v1::{initializer, optimizer};

    fn adagrad(lr: f32, eps: f32) -> Option<v1::Optimizer> {
        let kind = optimizer::Kind::Adagrad(v1::Adagrad { lr, eps, initial_accumulator: 0.0 });
        Some(v1::Optimizer { kind: Some(kind), weight_decay: 0.0, ..Default::default() })
    }

    fn items() -> v1::TableDefinition {
        v1::TableDefinition {
            name: "items".into(),
            dim: 16,
            optimizer: adagrad(0.05, 1e-10),
            ..Default::default()
        }
    }

    fn refused(change: impl FnOnce(&mut v1::TableDefinition)) -> String {
        let mut definition = items();
        change(&mut definition);
        TableSchema::new(1, &definition).expect_err("must be refused").to_string()
    }

    #[test]
    fn a_good_definition_has_a_shape() {
        let schema = TableSchema::new(3, &items()).expect("valid");
        assert_eq!((schema.shape().dim, schema.shape().state), (16, 16));
        let plain = v1::TableDefinition { optimizer: None, ..items() };
        assert_eq!(TableSchema::new(3, &plain).expect("valid").shape().state, 0);
    }

    #[test]
    fn every_refusal_names_the_field() {
        assert!(refused(|d| d.name.clear()).contains("name"));
        assert!(refused(|d| d.name = "x".repeat(129)).contains("128"));
        assert!(refused(|d| d.name = "a\nb".into()).contains("control"));
        assert!(refused(|d| d.name = " a".into()).contains("blank"));
        assert!(refused(|d| d.dim = 0).contains("dim is 0"));
        assert!(refused(|d| d.dim = limits::DIM_MAX + 1).contains("65537"));
        assert!(refused(|d| d.kind = 9).contains("kind"));
        assert!(refused(|d| d.non_finite = 9).contains("non_finite"));
        for lr in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            assert!(refused(|d| d.optimizer = adagrad(lr, 1e-10)).contains("adagrad.lr"));
        }
        assert!(refused(|d| d.optimizer = adagrad(0.1, 0.0)).contains("adagrad.eps"));
        assert!(
            refused(|d| d.optimizer = Some(v1::Optimizer::default()))
                .contains("optimizer is of an unknown kind")
        );
        assert!(
            refused(|d| d.optimizer.as_mut().expect("there").weight_decay = -0.1)
                .contains("optimizer.weight_decay")
        );
        let uniform = |low, high| {
            let kind = initializer::Kind::Uniform(v1::Uniform { low, high });
            Some(v1::Initializer { kind: Some(kind), seed: 0 })
        };
        assert!(refused(|d| d.initializer = uniform(1.0, 0.0)).contains("uniform.high"));
        assert!(refused(|d| d.initializer = uniform(-f32::MAX, f32::MAX)).contains("uniform.high"));
        let adam = |beta2| {
            let kind = optimizer::Kind::Adam(v1::Adam { lr: 0.1, beta1: 0.9, beta2, eps: 1e-8 });
            Some(v1::Optimizer { kind: Some(kind), weight_decay: 0.0, ..Default::default() })
        };
        assert!(refused(|d| d.optimizer = adam(1.0)).contains("adam.beta2"));
    }

    #[test]
    fn the_same_definition_is_no_conflict() {
        let schema =
            |definition: &v1::TableDefinition, number| TableSchema::new(number, definition).expect("valid");
        let base = schema(&items(), 1);
        assert!(base.same_definition(&schema(&items(), 2)));
        let zeros = v1::Initializer { kind: Some(initializer::Kind::Zeros(v1::Zeros {})), seed: 77 };
        assert!(
            base.same_definition(&schema(&v1::TableDefinition { initializer: Some(zeros), ..items() }, 2))
        );
        for other in [
            v1::TableDefinition { dim: 17, ..items() },
            v1::TableDefinition { name: "users".into(), ..items() },
            v1::TableDefinition { optimizer: None, ..items() },
            v1::TableDefinition { optimizer: adagrad(0.06, 1e-10), ..items() },
            v1::TableDefinition { non_finite: 2, ..items() },
        ] {
            assert!(!base.same_definition(&schema(&other, 1)));
        }
    }

    fn weight(shape: &[u64]) -> v1::TableDefinition {
        let dim = TensorLayout::new(shape).map_or(0, |layout| layout.dim());
        let tensor = Some(v1::TensorDefinition { shape: shape.to_vec(), ..Default::default() });
        v1::TableDefinition { name: "w".into(), kind: v1::TableKind::Dense.into(), dim, tensor, ..items() }
    }

    #[test]
    fn a_tensor_has_blocks_and_a_table_of_an_old_build_has_rows() {
        let schema = TableSchema::new(3, &weight(&[300, 100])).expect("valid");
        assert_eq!((schema.shape().dim, schema.tensor().map(TensorLayout::blocks)), (16_384, Some(2)));
        let old = v1::TableDefinition { kind: v1::TableKind::Dense.into(), ..items() };
        assert_eq!(TableSchema::new(3, &old).expect("as it was").tensor(), None);
        for (shape, dtype) in [(vec![100, 300], 0), (vec![300, 100], 2)] {
            let tensor = Some(v1::TensorDefinition { shape, dtype });
            let other = v1::TableDefinition { tensor, ..weight(&[300, 100]) };
            assert!(!schema.same_definition(&TableSchema::new(3, &other).expect("valid")));
        }
    }

    #[test]
    fn a_tensor_that_cannot_be_is_refused_by_name() {
        let refused = |definition: v1::TableDefinition| {
            TableSchema::new(1, &definition).expect_err("must be refused").to_string()
        };
        assert!(refused(weight(&[1; 9])).contains("8 dimensions"));
        assert!(refused(weight(&[2, 0])).contains("dimension 1"));
        assert!(refused(v1::TableDefinition { dim: 64, ..weight(&[300, 100]) }).contains("dim is 64"));
        assert!(refused(v1::TableDefinition { kind: 0, ..weight(&[3]) }).contains("kind DENSE"));
        assert!(refused(v1::TableDefinition { non_finite: 1, ..weight(&[3]) }).contains("skip_row"));
        let tensor = Some(v1::TensorDefinition { shape: vec![3], dtype: 7 });
        assert!(refused(v1::TableDefinition { tensor, ..weight(&[3]) }).contains("dtype"));
        let rowwise = v1::RowwiseAdagrad { lr: 0.1, eps: 1e-8, initial_accumulator: 0.0 };
        let kind = Some(optimizer::Kind::RowwiseAdagrad(rowwise));
        let optimizer = Some(v1::Optimizer { kind, ..Default::default() });
        assert!(refused(v1::TableDefinition { optimizer, ..weight(&[3]) }).contains("row-wise"));
        let optimizer = adagrad(0.1, 1e-8).map(|o| v1::Optimizer { clip_norm: 1.0, ..o });
        assert!(refused(v1::TableDefinition { optimizer, ..weight(&[3]) }).contains("clip_norm"));
    }

    #[test]
    fn glorot_of_a_tensor_takes_its_fans_from_the_shape() {
        let initializer = |shape: &[u64], fan_in, fan_out| {
            let kind = initializer::Kind::Glorot(v1::Glorot { normal: false, fan_in, fan_out, gain: 0.0 });
            let initializer = Some(v1::Initializer { kind: Some(kind), seed: 0 });
            TableSchema::new(1, &v1::TableDefinition { initializer, ..weight(shape) })
                .map(|schema| schema.initializer.distribution)
        };
        let bound = |fans: f64| {
            let bound = (6.0 / fans).sqrt() as f32;
            Ok(Distribution::Uniform { low: -bound, high: bound })
        };
        assert_eq!(initializer(&[300, 100], 0, 0), bound(400.0));
        assert_eq!(initializer(&[8, 4, 3, 3], 0, 0), bound(108.0), "a convolution's kernel counts in both");
        assert_eq!(initializer(&[300], 20, 30), bound(50.0), "as given");
        assert!(initializer(&[300], 0, 0).expect_err("one dimension").to_string().contains("glorot"));
        assert!(initializer(&[3, 4], 20, 0).expect_err("half").to_string().contains("glorot.fan_out"));
    }

    #[test]
    fn what_lies_beyond_a_tensors_end_is_zero() {
        let kind = initializer::Kind::Constant(v1::Constant { value: 2.0 });
        let initializer = Some(v1::Initializer { kind: Some(kind), seed: 0 });
        let definition = v1::TableDefinition { initializer, ..weight(&[16_385]) };
        let schema = TableSchema::new(1, &definition).expect("valid");
        let (mut weights, mut state) = (vec![9.0; 16_384], vec![9.0; 16_384]);
        schema.fill_new_row(1, &mut weights, &mut state);
        assert_eq!((weights[0], weights[1]), (2.0, 0.0));
        assert!(weights[1..].iter().all(|weight| *weight == 0.0));
        schema.fill_new_weights(0, &mut weights);
        assert!(weights.iter().all(|weight| *weight == 2.0));
    }

    #[test]
    fn hyper_parameters_are_numbers_of_the_same_kind_of_optimizer() {
        let schema = |definition: &v1::TableDefinition| TableSchema::new(1, definition).expect("valid");
        let base = schema(&items());
        let mut clipped = items();
        clipped.optimizer.as_mut().expect("there").clip_norm = 1.0;
        clipped.optimizer.as_mut().expect("there").schedule =
            Some(v1::Schedule { warmup_steps: 3, decay: None });
        let slower = v1::TableDefinition { optimizer: adagrad(0.01, 1e-8), ..items() };
        for other in [items(), slower, clipped.clone()] {
            assert!(base.differs_in_hyper_parameters_only(&schema(&other)));
        }
        let sgd = optimizer::Kind::Sgd(v1::Sgd { lr: 0.05 });
        let sgd = Some(v1::Optimizer { kind: Some(sgd), ..Default::default() });
        for other in [
            v1::TableDefinition { optimizer: sgd, ..items() },
            v1::TableDefinition { optimizer: None, ..items() },
            v1::TableDefinition { dim: 17, ..clipped.clone() },
            v1::TableDefinition { non_finite: 2, ..clipped },
        ] {
            assert!(!base.differs_in_hyper_parameters_only(&schema(&other)));
        }
    }

    #[test]
    fn a_description_carries_its_version() {
        let description =
            v1::TableDescription { number: 3, definition: Some(items()), definition_version: 7 };
        let schema = TableSchema::from_description(&description).expect("valid");
        assert_eq!((schema.version(), schema.description()), (7, description));
    }
}
