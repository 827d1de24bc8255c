//! What a node counts, as its metrics say.

use super::Cluster;

/// The sum of a metric over its labels, or its value for the labels that `name` has; 0 when the node does not have it (yet).
pub(crate) async fn metric(cluster: &Cluster, node: u64, name: &str) -> f64 {
    let text = cluster.node(node).http("/metrics").await;
    let values = text.lines().filter_map(|line| {
        let (of, value) = line.rsplit_once(' ')?;
        let found = of == name || of.split('{').next() == Some(name);
        found.then(|| value.parse::<f64>().ok()).flatten()
    });
    values.sum()
}
