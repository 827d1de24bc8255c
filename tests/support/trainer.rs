//! A client as a test writes it: tables whose arithmetic is exact, and errors that can be looked at.

/// A client with a session of its own.
#[derive(Debug, Clone)]
pub(crate) struct Trainer {}

/// A table of a cluster.
#[derive(Debug, Clone)]
pub(crate) struct Table {}

impl Trainer {
    pub(crate) async fn connect(_endpoints: &str) -> Self {
        panic!("tools/client is being written")
    }

    /// An existing table.
    pub(crate) async fn table(&self, _name: &str) -> Table {
        panic!("tools/client is being written")
    }

    /// SGD with lr = 1, zeros: a pull shows the negated sum of all pushes.
    pub(crate) async fn integers(&self, _name: &str, _dim: usize) -> Table {
        panic!("tools/client is being written")
    }

    /// Adagrad, zeros.
    pub(crate) async fn adagrad(&self, _name: &str, _dim: usize) -> Table {
        panic!("tools/client is being written")
    }

    /// SGD, rows drawn from a normal distribution.
    pub(crate) async fn normal(&self, _name: &str, _dim: usize) -> Table {
        panic!("tools/client is being written")
    }
}

impl Table {
    pub(crate) async fn push(&self, _ids: &[u64], _gradients: &[f32]) -> Result<(), String> {
        panic!("tools/client is being written")
    }

    pub(crate) async fn set(&self, _ids: &[u64], _values: &[f32]) -> Result<(), String> {
        panic!("tools/client is being written")
    }

    pub(crate) async fn pull(&self, _ids: &[u64]) -> Result<Vec<f32>, String> {
        panic!("tools/client is being written")
    }
}
