//! The cost of planning and committing in jobs of up to 16 384 ranks, without their data. `make
//! bench-ranks` prints the table.
//!
//! The state is that of a Llama of 405 billion parameters: weights in bf16, cut over tensor and
//! pipeline stages and held alike by all data-parallel ranks; master weights and two moments in
//! fp32, of which each data-parallel rank has a flat part. Eight ranks are on a node.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use stepwell_core::dtype::Dtype;
use stepwell_core::format::index::{
    ChunkRecord, Codec, Extent, FileRecord, Index, Integrity, LeafRecord, Source, TensorRecord,
};
use stepwell_core::format::manifest::{Attempt, Manifest};
use stepwell_core::io::Disk;
use stepwell_core::io::simulated::SimDisk;
use stepwell_core::leaf_path::{Component, LeafPath};
use stepwell_core::limits::{COMPARED_RANKS, MAX_MANIFEST_BYTES};
use stepwell_core::provider::{Fill, StateProvider};
use stepwell_core::region::{Region, row_major_strides};
use stepwell_core::save::{ItemPlan, LeafPlan};
use stepwell_core::staging::{Filling, Slot};
use stepwell_core::tree::{ContainerKind, Tree};
use stepwell_reshard::read_plan::{self, Request};
use stepwell_reshard::subchunk::{self, run_to_boxes};

use crate::commit::ItemPart;
use crate::commit::records::{Record, records};
use crate::commit::vote::merge_votes;
use crate::commit::{Draft, Vote};
use crate::directory_layout::MANIFEST;
use crate::state::{self, Census, Holders, LeafSource, Part, StateSource, Writing, plain_leaves};
use crate::stored_index::StoredIndex;

/// Ranks of a node, and of a tensor-parallel group.
const TP: u32 = 8;
const LAYERS: u64 = 126;
const HIDDEN: u64 = 16_384;
const INNER: u64 = 53_248;
const KEYS: u64 = 1024;
const VOCABULARY: u64 = 128_256;

struct Nothing;

impl StateProvider for Nothing {
    fn capture(&self, _: &[Fill<'_>], _: &mut Slot<Filling>) -> stepwell_core::Result<()> {
        Ok(())
    }
}

/// The place of a rank.
#[derive(Clone, Copy)]
struct Job {
    pp: u32,
    dp: u32,
}

impl Job {
    fn ranks(self) -> u32 {
        TP * self.pp * self.dp
    }

    /// Tensor-parallel ranks are neighbours, then come the data-parallel ones.
    fn place(self, rank: u32) -> (u32, u32, u32) {
        (rank % TP, rank / TP % self.dp, rank / TP / self.dp)
    }

    fn nodes(self) -> Vec<u32> {
        (0..self.ranks()).map(|rank| rank / TP).collect()
    }

    /// Name, shape, and the dimension along which it is cut.
    fn tensors(self, stage: u32) -> Vec<(String, Vec<u64>, Option<usize>)> {
        let of_stage = |layer: u64| layer * u64::from(self.pp) / LAYERS == u64::from(stage);
        let mut out = Vec::new();
        if stage == 0 {
            out.push(("embed.weight".to_owned(), vec![VOCABULARY, HIDDEN], Some(0)));
        }
        for layer in (0..LAYERS).filter(|&layer| of_stage(layer)) {
            let mut add = |name: &str, shape: Vec<u64>, axis| {
                out.push((format!("layers.{layer}.{name}.weight"), shape, axis));
            };
            add("q_proj", vec![HIDDEN, HIDDEN], Some(0));
            add("k_proj", vec![KEYS, HIDDEN], Some(0));
            add("v_proj", vec![KEYS, HIDDEN], Some(0));
            add("o_proj", vec![HIDDEN, HIDDEN], Some(1));
            add("gate_proj", vec![INNER, HIDDEN], Some(0));
            add("up_proj", vec![INNER, HIDDEN], Some(0));
            add("down_proj", vec![HIDDEN, INNER], Some(1));
            add("input_layernorm", vec![HIDDEN], None);
            add("post_attention_layernorm", vec![HIDDEN], None);
        }
        if stage + 1 == self.pp {
            out.push(("norm.weight".to_owned(), vec![HIDDEN], None));
            out.push(("lm_head.weight".to_owned(), vec![VOCABULARY, HIDDEN], Some(0)));
        }
        out
    }

    /// The state of a rank.
    fn state(self, rank: u32) -> StateSource {
        let (tp, dp, stage) = self.place(rank);
        let tensors = self.tensors(stage);
        let key = |name: &str| Some(Component::Key(name.into()));
        let mut tree = Tree::new();
        let mut leaves = Vec::new();
        tree.push_container(None, None, ContainerKind::Dict);
        let cut = |shape: &[u64], axis: Option<usize>| {
            let mut region = Region::whole(shape);
            if let Some(axis) = axis {
                region.extent[axis] /= u64::from(TP);
                region.offset[axis] = region.extent[axis] * u64::from(tp);
            }
            region
        };
        let base = stage * self.dp * TP;
        let replicas: Arc<[u32]> = (0..self.dp).map(|other| base + other * TP + tp).collect();
        let everyone: Arc<[u32]> = (base..base + self.dp * TP).collect();
        let params = tree.push_container(Some(0), key("params"), ContainerKind::Dict);
        for (name, shape, axis) in &tensors {
            tree.push_leaf(Some(params), key(name));
            let holders = Holders::Ranks(Arc::clone(if axis.is_some() { &replicas } else { &everyone }));
            let parts = vec![Part { region: cut(shape, *axis), holders }];
            leaves.push(LeafSource::Tensor {
                dtype: Dtype::Bfloat16,
                shape: shape.clone(),
                parts,
                provider: Arc::new(Nothing),
            });
        }
        // All parameters of the rank behind each other, of which it has one of `dp` parts. Norms
        // are the first tensor-parallel rank's.
        let owned = |axis: Option<usize>| axis.is_some() || tp == 0;
        let total: u64 = tensors
            .iter()
            .filter(|(_, _, axis)| owned(*axis))
            .map(|(_, shape, axis)| cut(shape, *axis).volume().unwrap())
            .sum();
        let (begin, end) =
            (total * u64::from(dp) / u64::from(self.dp), total * u64::from(dp + 1) / u64::from(self.dp));
        for slot in ["master", "exp_avg", "exp_avg_sq"] {
            let item = tree.push_container(Some(0), key(slot), ContainerKind::Dict);
            let mut at = 0;
            for (name, shape, axis) in tensors.iter().filter(|(_, _, axis)| owned(*axis)) {
                let region = cut(shape, *axis);
                let size = region.volume().unwrap();
                let (from, to) = (begin.clamp(at, at + size) - at, end.clamp(at, at + size) - at);
                at += size;
                let boxes = run_to_boxes(&region.extent, from, to - from).unwrap();
                if boxes.is_empty() {
                    continue;
                }
                tree.push_leaf(Some(item), key(name));
                let part = |mut inner: Region| {
                    inner.offset.iter_mut().zip(&region.offset).for_each(|(at, first)| *at += first);
                    Part { region: inner, holders: Holders::This }
                };
                leaves.push(LeafSource::Tensor {
                    dtype: Dtype::Float32,
                    shape: shape.clone(),
                    parts: boxes.into_iter().map(part).collect(),
                    provider: Arc::new(Nothing),
                });
            }
        }
        StateSource { tree, leaves }
    }
}

/// The index in the footer of an item's data file.
fn written(rank: u32, plan: ItemPlan) -> Index {
    let mut offset = 4096;
    let mut extent = |bytes: u64| {
        let extent = Extent { source: Source::Own(0), offset, length: bytes, integrity: Integrity::BlockCrc };
        offset = (offset + bytes).next_multiple_of(4096);
        extent
    };
    let leaves = plan.leaves.into_iter().map(|leaf| match leaf {
        LeafPlan::Tensor { dtype, shape, chunks, .. } => LeafRecord::Tensor(TensorRecord {
            dtype,
            shape: shape.into(),
            chunks: chunks
                .into_iter()
                .map(|chunk| {
                    let bytes = chunk.local.volume().unwrap() * dtype.size() as u64;
                    ChunkRecord { region: chunk.region, extent: extent(bytes), codec: Codec::Raw }
                })
                .collect(),
        }),
        LeafPlan::Object(_) | LeafPlan::Elsewhere | LeafPlan::Alias { .. } => {
            panic!("no such leaf is in this state")
        }
    });
    let leaves: Vec<LeafRecord> = leaves.collect();
    let name = format!("{rank:05}.data").into();
    Index {
        tree: plan.tree,
        leaves,
        files: vec![FileRecord {
            name,
            length: offset + 16_384,
            file_id: u128::from(rank) + 1,
            trailer_crc: 1,
            within: None,
        }],
    }
}

/// How many milliseconds it takes.
fn timed<T>(work: impl FnOnce() -> T) -> (T, f64) {
    let began = Instant::now();
    let out = work();
    (out, began.elapsed().as_secs_f64() * 1e3)
}

/// The jobs that are looked at, up to `STEPWELL_RANKS` ranks.
fn jobs() -> impl Iterator<Item = Job> {
    let largest: u32 = std::env::var("STEPWELL_RANKS").map_or(16_384, |ranks| ranks.parse().unwrap());
    let jobs = [(2, 1), (16, 1), (16, 8), (16, 32), (16, 128)].map(|(pp, dp)| Job { pp, dp });
    jobs.into_iter().filter(move |job| job.ranks() <= largest)
}

/// The one in the middle, and the longest.
fn median(mut times: Vec<f64>) -> (f64, f64) {
    times.sort_by(f64::total_cmp);
    (times[times.len() / 2], times[times.len() - 1])
}

fn draft(items: &mut state::StateItems) -> Draft {
    Draft {
        root: PathBuf::from("/root"),
        step: 1,
        plan_hash: items.plan_hash.clone(),
        items: items.drafts.clone(),
        claims: std::mem::take(&mut items.claims),
        ..Draft::default()
    }
}

/// A rank's plan, and the time to make it.
fn planned(job: Job, nodes: &[u32], rank: u32) -> (state::StateItems, f64) {
    let state = job.state(rank);
    let writing = Writing {
        rank,
        world_size: job.ranks(),
        nodes,
        limit: None,
        compares: nodes.len() <= COMPARED_RANKS,
        census: None,
    };
    timed(|| {
        let items = state::items(&state, &subchunk::SubchunkOptions::HOST, &writing).unwrap();
        let draft = Draft { items: items.drafts.clone(), ..Draft::default() };
        draft.check(&"0".repeat(32), job.ranks()).unwrap();
        items
    })
}

/// Of one rank of a job with 8 tensor-parallel ranks and 8 stages that restores weights and
/// optimizer: bytes of the indexes that it reads, and how long it reads them and plans.
fn replanned(records: &[(Option<String>, Record)]) -> (u64, f64) {
    let job = Job { pp: 8, dp: 1 };
    let wanted = job.state(9);
    let dir = SimDisk::new().create_dir_all(Path::new("/step")).unwrap();
    for (item, record) in records {
        if let Some(item) = item {
            let _ = dir.create_dir(item);
        }
        dir.write_file(&record.path, &record.bytes).unwrap();
    }
    let manifest = dir.read_file(MANIFEST, MAX_MANIFEST_BYTES).unwrap();
    let manifest = Manifest::decode(&manifest, Path::new(MANIFEST)).unwrap();
    let paths: Vec<LeafPath> =
        (0..wanted.leaves.len() as u32).map(|leaf| wanted.tree.leaf_path(leaf)).collect();
    let (stored, took) = timed(|| {
        let stored = StoredIndex::read(&*dir, &manifest).unwrap();
        let of_path: HashMap<&LeafPath, &LeafSource> = paths.iter().zip(&wanted.leaves).collect();
        let mut requests = Vec::new();
        for leaf in 0..stored.outline().leaves.len() as u32 {
            let path = stored.outline().tree.leaf_path(leaf);
            let Some(LeafSource::Tensor { parts, dtype, .. }) = of_path.get(&path) else { continue };
            for part in parts {
                let strides = row_major_strides(&part.region.extent);
                requests.push(Request {
                    leaf,
                    region: part.region.clone(),
                    dst: requests.len() as u32,
                    dst_offset: 0,
                    dst_strides: strides.iter().map(|&n| n as i64 * dtype.size() as i64).collect(),
                });
            }
        }
        assert!(requests.len() >= wanted.leaves.len());
        let index = stored.with(requests.iter().map(|request| request.leaf)).unwrap();
        read_plan::copies(&index, &requests).unwrap();
        stored
    });
    (stored.bytes_read().0, took)
}

#[test]
#[ignore = "a measurement: make bench-ranks"]
fn what_planning_and_committing_cost() {
    let attempt = Attempt { session: "0".repeat(32), counter: 1 };
    println!(
        "| ranks | nodes | chunks | plan of a save, ms | vote of a rank, KiB | of a node, KiB | gathering a node, ms | messages to the leader | MiB in all | leader, ms | index, MiB | of it for a rank's restore | its plan, ms |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|---|");
    for job in jobs() {
        let nodes = job.nodes();
        let mut messages: Vec<(u32, Vec<u8>)> = Vec::new();
        let (mut plans, mut gathers, mut own, mut all) = (Vec::new(), Vec::new(), Vec::new(), 0);
        let mut chunks = 0;
        let mut leader = None;
        for first in (0..job.ranks()).step_by(TP as usize) {
            let mut of_node = Vec::new();
            for rank in first..first + TP {
                let (mut items, took) = planned(job, &nodes, rank);
                plans.push(took);
                let draft = draft(&mut items);
                let by_dir: BTreeMap<_, _> =
                    draft.items.iter().map(|item| (item.dir.clone(), item.clone())).collect();
                let parts = std::mem::take(&mut items.plans).into_iter().map(|plan| {
                    let item = by_dir[&plan.dir].clone();
                    let index = written(rank, plan);
                    chunks += index.leaves.iter().map(|leaf| leaf.extents().count()).sum::<usize>();
                    ItemPart { item, index, tensor_bytes: 1 }
                });
                let vote = Vote {
                    rank,
                    step: 1,
                    attempt: attempt.clone(),
                    stale: false,
                    claims: draft.claims.clone(),
                    unsupported: Vec::new(),
                    parts: Ok(parts.collect()),
                };
                if rank == first {
                    own.push(vote.encode().unwrap().len());
                }
                if rank == 0 {
                    leader = Some(draft.clone());
                }
                of_node.push((vote, draft));
            }
            let draft = of_node[0].1.clone();
            let votes = of_node.into_iter().map(|(vote, _)| vote.encode().unwrap()).collect::<Vec<_>>();
            let (message, took) = timed(|| {
                let votes = (first..).zip(&votes).map(|(rank, vote)| Vote::decode(rank, vote).unwrap());
                merge_votes(&draft, &attempt, first, votes.collect()).encode().unwrap()
            });
            gathers.push(took);
            all += message.len();
            messages.push((first, message));
        }
        let draft = leader.unwrap();
        let (records, took) = timed(|| {
            let votes = messages.iter().map(|(rank, message)| Vote::decode(*rank, message).unwrap());
            records(&draft, &attempt, job.ranks(), votes.collect(), 0).unwrap()
        });
        let (read, replan) = replanned(&records.1);
        let index: usize = records.1.iter().map(|(_, record)| record.bytes.len()).sum();
        let ((plan, worst), (gathered, _)) = (median(plans), median(gathers));
        println!(
            "| {} | {} | {chunks} | {plan:.1} (at most {worst:.1}) | {} | {} | {gathered:.1} | {} | {:.1} | {took:.0} | {:.1} | {:.1} | {replan:.0} |",
            job.ranks(),
            messages.len(),
            own[own.len() / 2] >> 10,
            (all / messages.len()) >> 10,
            messages.len() - 1,
            all as f64 / f64::from(1 << 20),
            index as f64 / f64::from(1 << 20),
            read as f64 / f64::from(1 << 20),
        );
    }
}

/// The same state, where no layout says who holds what: ranks tell each other, once before the
/// first save.
fn told_by_nobody(job: Job, rank: u32) -> StateSource {
    let mut state = job.state(rank);
    for leaf in &mut state.leaves {
        let LeafSource::Tensor { parts, .. } = leaf else { continue };
        for part in parts.iter_mut().filter(|part| matches!(part.holders, Holders::Ranks(_))) {
            part.holders = Holders::Everyone;
        }
    }
    state
}

#[test]
#[ignore = "a measurement: make bench-ranks"]
fn what_it_costs_to_ask_who_holds_what() {
    println!(
        "| ranks | parts of a rank | its hashes, ms | said by a rank, KiB | in all, MiB | leader, ms | told to each, KiB | read by a rank, ms |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for job in jobs() {
        let mut hashing = Vec::new();
        let mut parts = 0;
        let said: Vec<Vec<u8>> = (0..job.ranks())
            .map(|rank| {
                let state = told_by_nobody(job, rank);
                let (leaves, took) = timed(|| plain_leaves(&state));
                parts = parts.max(leaves.len());
                hashing.push(took);
                serde_json::to_vec(&(rank, leaves)).unwrap()
            })
            .collect();
        let (encoded, leader) = timed(|| {
            let said = said.iter().map(|said| serde_json::from_slice(said).unwrap());
            serde_json::to_vec(&Census::new(&said.collect::<Vec<_>>()).encoded()).unwrap()
        });
        let (_, heard) = timed(|| Census::decoded(serde_json::from_slice(&encoded).unwrap()));
        println!(
            "| {} | {parts} | {:.1} | {:.1} | {:.1} | {leader:.0} | {:.0} | {heard:.1} |",
            job.ranks(),
            median(hashing).0,
            said[0].len() as f64 / 1024.0,
            said.iter().map(Vec::len).sum::<usize>() as f64 / f64::from(1 << 20),
            encoded.len() as f64 / 1024.0,
        );
    }
}
