use proptest::prelude::*;

use super::*;

/// Shows a node and what is below it, as Python would write it.
fn show(bytes: &[u8], pickle: &Pickle, id: NodeId, depth: usize) -> String {
    if depth == 0 {
        return "…".to_owned();
    }
    let list = |ids: &[NodeId]| {
        ids.iter().map(|&id| show(bytes, pickle, id, depth - 1)).collect::<Vec<_>>().join(", ")
    };
    let dict = |pairs: &[(NodeId, NodeId)]| {
        let pair = |&(key, value): &(NodeId, NodeId)| {
            format!("{}: {}", show(bytes, pickle, key, depth - 1), show(bytes, pickle, value, depth - 1))
        };
        pairs.iter().map(pair).collect::<Vec<_>>().join(", ")
    };
    let text = |span: &Span| String::from_utf8_lossy(&bytes[span.range()]).into_owned();
    match &pickle.nodes[id as usize] {
        PickleNode::None => "None".to_owned(),
        PickleNode::Bool(value) => format!("{value}"),
        PickleNode::Int(value) => format!("{value}"),
        PickleNode::Long(span) => format!("long of {} bytes", span.range().len()),
        PickleNode::Float(value) => format!("{value}"),
        PickleNode::Str(span) => format!("'{}'", text(span)),
        PickleNode::Bytes(span) => format!("b'{}'", text(span)),
        PickleNode::ByteArray(span) => format!("bytearray '{}'", text(span)),
        PickleNode::List(ids) => format!("[{}]", list(ids)),
        PickleNode::Tuple(ids) => format!("({})", list(ids)),
        PickleNode::Dict(pairs) => format!("{{{}}}", dict(pairs)),
        PickleNode::Set(ids) => format!("set {{{}}}", list(ids)),
        PickleNode::FrozenSet(ids) => format!("frozenset {{{}}}", list(ids)),
        PickleNode::Global(global) => format!("{}.{}", global.module, global.name),
        PickleNode::Persistent(id) => format!("persistent {}", show(bytes, pickle, *id, depth - 1)),
        PickleNode::Call(call) => {
            let callable = show(bytes, pickle, call.callable, depth - 1);
            let args = show(bytes, pickle, call.args, depth - 1);
            let with = |shown: String| if shown.is_empty() { shown } else { format!(" with {shown}") };
            let state = call.state.map(|state| format!(" state {}", show(bytes, pickle, state, depth - 1)));
            let (entries, items) = (with(dict(&call.entries)), with(list(&call.items)));
            format!("{callable}{args}{entries}{items}{}", state.unwrap_or_default())
        }
    }
}

fn shown(bytes: &[u8]) -> String {
    let pickle = parse(bytes).unwrap();
    assert_eq!(pickle.length, bytes.len());
    show(bytes, &pickle, pickle.root, 12)
}

fn refused(bytes: &[u8]) -> String {
    parse(bytes).map(|pickle| pickle.nodes.len()).unwrap_err().to_string()
}

/// `pickle.dumps(OrderedDict(a=[1, (2, 3.5), None, True, b"xy", "ü"], b={1: {-5}, 2**70: 2**40}))`.
const ORDERED_2: &[u8] = b"\x80\x02ccollections\nOrderedDict\nq\x00)Rq\x01(X\x01\x00\x00\x00aq\x02]q\x03(K\x01K\x02G@\x0c\x00\x00\x00\x00\x00\x00\x86q\x04N\x88c_codecs\nencode\nq\x05X\x02\x00\x00\x00xyq\x06X\x06\x00\x00\x00latin1q\x07\x86q\x08Rq\tX\x02\x00\x00\x00\xc3\xbcq\neX\x01\x00\x00\x00bq\x0b}q\x0c(K\x01c__builtin__\nset\nq\r]q\x0eJ\xfb\xff\xff\xffa\x85q\x0fRq\x10\x8a\t\x00\x00\x00\x00\x00\x00\x00\x00@\x8a\x06\x00\x00\x00\x00\x00\x01uu.";
const ORDERED_4: &[u8] = b"\x80\x04\x95g\x00\x00\x00\x00\x00\x00\x00\x8c\x0bcollections\x94\x8c\x0bOrderedDict\x94\x93\x94)R\x94(\x8c\x01a\x94]\x94(K\x01K\x02G@\x0c\x00\x00\x00\x00\x00\x00\x86\x94N\x88C\x02xy\x94\x8c\x02\xc3\xbc\x94e\x8c\x01b\x94}\x94(K\x01\x8f\x94(J\xfb\xff\xff\xff\x90\x8a\t\x00\x00\x00\x00\x00\x00\x00\x00@\x8a\x06\x00\x00\x00\x00\x00\x01uu.";

#[test]
fn both_protocols_give_the_same_value() {
    assert_eq!(
        shown(ORDERED_2),
        "collections.OrderedDict() with 'a': [1, (2, 3.5), None, true, _codecs.encode('xy', 'latin1'), 'ü'], \
         'b': {1: __builtin__.set([-5]), long of 9 bytes: 1099511627776}"
    );
    assert_eq!(
        shown(ORDERED_4),
        "collections.OrderedDict() with 'a': [1, (2, 3.5), None, true, b'xy', 'ü'], \
         'b': {1: set {-5}, long of 9 bytes: 1099511627776}"
    );
}

#[test]
fn a_stream_may_go_on_behind_a_pickle() {
    let two = [b"\x80\x02K\x01.".as_slice(), b"\x80\x02K\x02."].concat();
    assert_eq!(parse(&two).unwrap().length, 5);
}

#[test]
fn every_prefix_of_a_stream_is_known_to_be_cut() {
    for stream in [ORDERED_2, ORDERED_4] {
        for length in 0..stream.len() {
            assert!(parse(&stream[..length]).unwrap_err().is_cut, "{length}");
        }
    }
    assert!(!parse(b"\x80\x02NNa.").unwrap_err().is_cut);
}

#[test]
fn strings_of_python_2_are_text_if_they_can_be() {
    assert_eq!(shown(b"\x80\x02U\x02\xc3\xbc."), "'ü'");
    assert_eq!(shown(b"\x80\x02T\x01\x00\x00\x00\xfc."), "b'\u{fffd}'");
}

#[test]
fn calls_are_named_and_never_made() {
    assert_eq!(shown(b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R."), "os.system('ls')");
    assert_eq!(shown(b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93)\x81}b."), "torch.os.system() state {}");
}

#[test]
fn a_value_may_contain_itself() {
    assert_eq!(shown(b"\x80\x02]q\x00h\x00a."), "[[[[[[[[[[[[…]]]]]]]]]]]]");
    // 60 tuples, each twice in the next: 2^60 leaves.
    let mut doubled = b"\x80\x02)".to_vec();
    doubled.extend(b"2\x86".repeat(60));
    doubled.push(b'.');
    assert_eq!(parse(&doubled).unwrap().nodes.len(), 61);
}

#[test]
fn bombs_are_refused_before_they_take_memory() {
    // One entry of the memo with a large number, which is an array of 2 GiB elsewhere.
    assert!(parse(b"\x80\x02Nr\xff\xff\xff\x07.").is_ok());
    let repeated = |opcode: &[u8]| [b"\x80\x02N", &*opcode.repeat(1 << 20), b"."].concat();
    for opcode in [b"]".as_slice(), b"}", b"]("] {
        assert!(refused(&repeated(opcode)).contains("in so few bytes"), "{opcode:?}");
    }
    // These are one node.
    for opcode in [b"N".as_slice(), b"\x88", b"\x89", b")", b"K\x05", b"2"] {
        assert!(parse(&repeated(opcode)).unwrap().nodes.len() <= 2, "{opcode:?}");
    }
    let nested =
        |levels: usize| [b"\x80\x02", &*b"]".repeat(levels), &*b"a".repeat(levels - 1), b"."].concat();
    assert!(parse(&nested(10_001)).is_ok());
    assert!(refused(&nested(10_002)).contains("nest more than 10000 levels"));
    assert!(refused(b"\x80\x02\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.").contains("more bytes were expected"));
}

#[test]
fn broken_streams_are_refused_by_place() {
    for (bytes, expected) in [
        (b"".as_slice(), "1 more bytes were expected"),
        (b"\x80\x09N.", "protocol 2 to 5 was expected, not 9 (at byte 0)"),
        (b"\x80\x02.", "more values than there are (at byte 2)"),
        (b"\x80\x02h\x07.", "the memo has no entry 7"),
        (b"\x80\x02Nt.", "no mark was set"),
        (b"\x80\x02}(K\x01u.", "a key has no value"),
        (b"\x80\x02NNa.", "appended to a value that is not a list"),
        (b"\x80\x02NNNs.", "set in a value that is not a dict"),
        (b"\x80\x02N}b.", "not an object"),
        (b"\x80\x02cos\nx\n)R}b}b.", "a second state"),
        (b"\x80\x02(cos\nsystem\nX\x02\x00\x00\x00lso.", "opcode OBJ"),
        (b"\x80\x02(X\x02\x00\x00\x00lsios\nsystem\n.", "opcode INST"),
        (b"I1\n.", "text of protocol 0"),
        (b"\x80\x02\x82\x01.", "opcode EXT"),
        (b"\x80\x02\xff.", "0xff is no opcode"),
        (b"\x80\x04K\x01K\x01\x93.", "no short text"),
    ] {
        let message = refused(bytes);
        assert!(
            message.contains(expected) || expected == "the pickle ends before",
            "{message} for {bytes:?}"
        );
    }
}

#[test]
fn a_value_below_a_mark_is_out_of_reach() {
    assert!(refused(b"\x80\x02N(.").contains("more values"));
    assert!(refused(b"\x80\x02cos\nx\n)(R.").contains("more values"));
}

proptest! {
    #[test]
    fn any_bytes_end_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = parse(&bytes);
    }

    #[test]
    fn a_changed_stream_ends_without_a_panic(at in 0..ORDERED_4.len(), value: u8, cut in 0..ORDERED_4.len()) {
        let mut bytes = ORDERED_4.to_vec();
        bytes[at] = value;
        if let Ok(pickle) = parse(&bytes) {
            show(&bytes, &pickle, pickle.root, 6);
        }
        let _ = parse(&bytes[..cut]);
    }
}
