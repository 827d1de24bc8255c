//! Tables as a whole: scans in pieces, and sizes.
//!
//! Not here: what a piece is (`crate::read`), consistency (`consistency`).

use std::sync::Arc;

use evershard_proto::limits::PULL_REPLY_BYTES_MAX;
use evershard_proto::v1::{ErrorKind, ScanReply, ScanRequest, SizeReply, SizeRequest};

use super::RequestError;
use super::consistency::ReadTerms;
use super::parameter::{ParameterDoor, read_error};

impl ParameterDoor {
    /// Reads a piece of a table. It may have to wait for the disk: it takes the room and the threads of those that do.
    pub(super) async fn scan(&self, request: ScanRequest) -> Result<ScanReply, RequestError> {
        let ScanRequest { group, table, consistency, max_staleness_ms, min_index, from_key, rows_max } =
            request;
        let replica = self.replicas.shard(group)?;
        let terms = ReadTerms::new(group, consistency, max_staleness_ms, min_index)?;
        self.before_read(&replica, &terms).await?;
        let _room = self.admit_cold(PULL_REPLY_BYTES_MAX, group)?;
        let scanning = Arc::clone(&replica);
        let piece = self.cold_pool.run(move || scanning.reader.scan(table, from_key, rows_max)).await;
        let piece = piece
            .map_err(|e| RequestError::new(ErrorKind::Exhausted, e.to_string()).in_group(group).retry_soon())?
            .map_err(|e| read_error(group, &e))?;
        self.after_read(&replica, &terms, piece.index)?;
        let mut crc32 = crc32fast::Hasher::new();
        crc32.update(&piece.keys);
        crc32.update(&piece.rows);
        Ok(ScanReply {
            index: piece.index,
            keys: piece.keys.freeze(),
            rows: piece.rows.freeze(),
            next_key: piece.next_key,
            crc32: crc32.finalize(),
        })
    }

    /// Counts a table's rows.
    pub(super) async fn size(&self, request: SizeRequest) -> Result<SizeReply, RequestError> {
        let SizeRequest { group, table, consistency, max_staleness_ms, min_index } = request;
        let replica = self.replicas.shard(group)?;
        let terms = ReadTerms::new(group, consistency, max_staleness_ms, min_index)?;
        self.before_read(&replica, &terms).await?;
        let Some((rows, index)) = replica.reader.size(table).map_err(|e| read_error(group, &e))? else {
            let what = format!(
                "group {group}: this replica was started lately and counts the rows of table {table} still"
            );
            return Err(RequestError::new(ErrorKind::Unavailable, what).in_group(group).retry_soon());
        };
        self.after_read(&replica, &terms, index)?;
        Ok(SizeReply { index, rows })
    }
}
