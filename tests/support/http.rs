//! What a node says over HTTP: its metrics.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::Cluster;

/// The body of a GET of a node.
pub(crate) async fn get(cluster: &Cluster, node: u64, path: &str) -> Result<String, String> {
    let port = cluster.node(node).settings.http_port;
    let ask = async {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
        let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await?;
        let mut reply = String::new();
        stream.read_to_string(&mut reply).await?;
        std::io::Result::Ok(reply)
    };
    let reply = ask.await.map_err(|error| error.to_string())?;
    let (_, body) = reply.split_once("\r\n\r\n").ok_or("no end of the headers")?;
    Ok(body.to_owned())
}

/// The sum of a metric over its labels; 0 when the node does not have it (yet).
pub(crate) async fn metric(cluster: &Cluster, node: u64, name: &str) -> f64 {
    let text = get(cluster, node, "/metrics").await.expect("metrics");
    let values = text.lines().filter_map(|line| {
        let (of, value) = line.rsplit_once(' ')?;
        let found = of.split('{').next() == Some(name);
        found.then(|| value.parse::<f64>().ok()).flatten()
    });
    values.sum()
}
