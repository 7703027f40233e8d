// tw_vec_lanes: the arithmetic of the vector unit. Collects the words of operands, holds the V
// registers and the quantisation parameters, and computes a vector's result once, when all of it
// has arrived. What is computed: docs/concepts/numerics.md; when: "Vector unit" of
// docs/concepts/microarchitecture.md.
//
// A word granted in t is here in t + 1. A long latency has room for registers: from 2 on, operands
// are collected before they are used (t + 2); from 3 on, the sum before the shift has one (t + 3).
module tw_vec_lanes
  import tw_pkg::*;
#(
    parameter int unsigned BLOCK_BYTES,  // of the largest operand: parameters or a table
    parameter int unsigned B_BYTES,      // of the largest on port B
    parameter int unsigned A_BITS,       // of the number of a word in its operand
    parameter int unsigned B_BITS,
    parameter int unsigned CHUNK_BITS    // of the number of elements of a chunk
) (
    input  logic                  clk,
    input  logic                  rst,
    input  logic [7:0]            fault,
    input  logic                  start,      // the cycle of the pop
    input  logic [511:0]          head,
    input  logic                  a_take,     // a word of A was granted: it is on a_data next cycle
    input  logic                  b_take,
    input  logic [A_BITS-1:0]     a_word,
    input  logic [B_BITS-1:0]     b_word,
    input  logic [WB-1:0]         a_data,
    input  logic [WB-1:0]         b_data,
    input  logic [N*32-1:0]       m_data,     // the accumulators a drain reads in this cycle
    input  logic                  item_done,  // an item was granted as a whole
    input  logic                  item_first,
    input  logic                  complete,   // and it is its vector's last
    input  logic [$clog2(W)-1:0]  a_offset,
    input  logic [$clog2(W)-1:0]  b_offset,
    input  logic [5:0]            entry,
    input  logic [6:0]            v_register,
    input  logic signed [31:0]    weight,
    input  logic                  chunk_first,  // rows, as in the reader
    input  logic                  pass_first,
    input  logic                  pass_last,
    input  logic [CHUNK_BITS-1:0] chunk,
    input  logic                  row_ready,
    output logic                  push,
    output logic [LANES*32-1:0]   result
);
  localparam int unsigned ENTRIES = QUANT_BANKS * QUANT_BANK_ENTRIES;
  localparam int unsigned ENTRY_BITS = $clog2(ENTRIES);
  localparam int unsigned V_BITS = $clog2(V_REGISTERS);
  localparam int unsigned TABLE_REGISTERS = (256 + 4 * LANES - 1) / (4 * LANES);
  localparam int unsigned TABLE_BITS = TABLE_REGISTERS * LANES * 32;
  localparam int unsigned POWER_REGISTERS = (512 + 4 * LANES - 1) / (4 * LANES);
  localparam int unsigned POWER_BITS = POWER_REGISTERS * LANES * 32;
  localparam int unsigned B_WORDS = (B_BYTES + W - 2) / W + 1;
  localparam int unsigned BLOCK_WORDS = (BLOCK_BYTES + W - 2) / W + 1;
  localparam int unsigned LANE_WORDS = (LANES + W - 2) / W + 1;
  localparam bit COLLECTED = VECTOR_LATENCY >= 2;
  localparam bit SUM_REGISTER = VECTOR_LATENCY >= 3;
  localparam int unsigned FACTOR_BITS = 42;  // largest: four of (8 bit - 8 bit) * 16 bit * 16 bit

  wire f_param_alias = FAULTS_BUILT && fault == FAULT_PARAM_ALIAS;
  wire f_round_ties = FAULTS_BUILT && fault == FAULT_ROUND_TIES;
  wire f_shift_high = FAULTS_BUILT && fault == FAULT_SHIFT_HIGH;
  wire f_table_last = FAULTS_BUILT && fault == FAULT_TABLE_LAST;

  // The place of an entry in the parameter memories. Upper banks fall on lower ones by the fault.
  localparam int unsigned UPPER = (1 << ($clog2(QUANT_BANKS) - 1)) * QUANT_BANK_ENTRIES;
  function automatic logic [ENTRY_BITS-1:0] place(input logic [5:0] number, input logic aliased);
    if (aliased && 32'(number) >= UPPER) place = ENTRY_BITS'(32'(number) - UPPER);
    else place = ENTRY_BITS'(number);
  endfunction

  // The shift with the target's rounding, zero point and clamp. Limits are without the zero point.
  function automatic logic [7:0] rescale(
      input logic signed [63:0] value, input logic [5:0] amount, input logic [7:0] zero,
      input logic signed [9:0] low, input logic signed [9:0] high, input logic floored,
      input logic other_ties);
    logic [63:0] half;
    logic [63:0] rest;  // what is shifted out
    logic signed [63:0] whole;
    logic up;
    logic tie;
    half  = (64'd1 << amount) >> 1;
    rest  = value & ((64'd1 << amount) - 64'd1);
    whole = value >>> amount;
    tie   = rest == half && half != '0;
    case (ROUNDING)
      ROUND_HALF_UP:   up = tie ? (!other_ties || whole[0]) : rest > half;
      ROUND_HALF_AWAY: up = tie ? (other_ties || !value[63]) : rest > half;
      ROUND_HALF_EVEN: up = tie ? (other_ties || whole[0]) : rest > half;
      default:         up = (tie && other_ties) || (value[63] && rest != '0);
    endcase
    if (up && !floored) whole = whole + 64'sd1;
    if (whole < 64'(low)) whole = 64'(low);
    else if (whole > 64'(high)) whole = 64'(high);
    rescale = whole[7:0] + zero;  // exact: the sum is in the clamp's range
  endfunction

  // The instruction.
  /* verilator lint_off UNUSEDSIGNAL */
  vec_param_t   of_param;
  vec_drain_t   of_drain;
  vec_eltwise_t of_eltwise;
  vec_copy_t    of_copy;
  vec_resize_t  of_resize;
  vec_softmax_t of_softmax;
  vec_layer_norm_t of_norm;
  /* verilator lint_on UNUSEDSIGNAL */
  assign of_param   = vec_param_t'(head);
  assign of_drain   = vec_drain_t'(head);
  assign of_eltwise = vec_eltwise_t'(head);
  assign of_copy    = vec_copy_t'(head);
  assign of_resize  = vec_resize_t'(head);
  assign of_softmax = vec_softmax_t'(head);
  assign of_norm    = vec_layer_norm_t'(head);

  logic [7:0] opcode_q;
  logic [2:0] op_q;
  logic bias_only_q;
  logic scalar_q;
  logic raw_q;
  logic as_is_q;  // the result is a code already: nothing is rescaled
  logic use_table_q;
  logic [V_BITS-1:0] v_table_q;
  logic [4:0] norm_shift_q;
  logic signed [7:0] za_q;
  logic signed [7:0] zb_q;
  logic signed [63:0] bias_q;
  logic [7:0] zp_q;  // its upper bit matters to the limits only
  logic signed [9:0] low_q;
  logic signed [9:0] high_q;
  logic signed [7:0] lo;
  logic signed [7:0] hi;
  logic signed [8:0] zp;
  logic signed [9:0] bias;
  logic [5:0] bias_shift;
  always_comb begin
    case (head[7:0])
      OP_VEC_ELTWISE: begin
        {lo, hi, zp} = {of_eltwise.lo, of_eltwise.hi, of_eltwise.zp};
        {bias, bias_shift} = {of_eltwise.bias, of_eltwise.bias_shift};
      end
      OP_VEC_COPY: begin
        {lo, hi, zp} = {of_copy.lo, of_copy.hi, of_copy.zp};
        {bias, bias_shift} = {of_copy.bias, of_copy.bias_shift};
      end
      OP_VEC_RESIZE: begin
        {lo, hi, zp} = {of_resize.lo, of_resize.hi, of_resize.zp};
        {bias, bias_shift} = {of_resize.bias, of_resize.bias_shift};
      end
      OP_VEC_SOFTMAX: begin
        {lo, hi, zp} = {of_softmax.lo, of_softmax.hi, of_softmax.zp};
        {bias, bias_shift} = '0;
      end
      OP_VEC_LAYER_NORM: begin
        {lo, hi, zp} = {of_norm.lo, of_norm.hi, of_norm.zp};
        {bias, bias_shift} = '0;
      end
      default: begin
        {lo, hi, zp} = {of_drain.lo, of_drain.hi, of_drain.zp};
        {bias, bias_shift} = '0;
      end
    endcase
  end
  always_ff @(posedge clk) begin
    if (start) begin
      opcode_q <= head[7:0];
      op_q <= of_eltwise.op;
      scalar_q <= of_eltwise.b_scalar;
      bias_only_q <= of_param.bias_only;
      raw_q <= head[7:0] == OP_VEC_DRAIN && of_drain.raw;
      use_table_q <= head[7:0] == OP_VEC_DRAIN ? of_drain.use_table :
                     head[7:0] == OP_VEC_COPY && of_copy.use_table;
      case (head[7:0])
        OP_VEC_DRAIN:   v_table_q <= V_BITS'(of_drain.v_table);
        OP_VEC_SOFTMAX: v_table_q <= V_BITS'(of_softmax.v_table);
        default:        v_table_q <= V_BITS'(of_copy.v_table);
      endcase
      norm_shift_q <= of_norm.shift;
      case (head[7:0])
        OP_VEC_ELTWISE: as_is_q <= of_eltwise.op >= 3'd3;
        OP_VEC_COPY:    as_is_q <= !of_copy.requantise;
        OP_VEC_POOL:    as_is_q <= 1'b1;
        default:        as_is_q <= 1'b0;
      endcase
      case (head[7:0])
        OP_VEC_ELTWISE: za_q <= of_eltwise.za;
        OP_VEC_COPY:    za_q <= of_copy.za;
        default:        za_q <= of_resize.za;
      endcase
      zb_q <= of_eltwise.zb;
      bias_q <= 64'(bias) <<< bias_shift;
      zp_q <= zp[7:0];
      low_q <= 10'(lo) - 10'(zp);
      high_q <= 10'(hi) - 10'(zp);
    end
  end
  wire is_param = opcode_q == OP_VEC_PARAM;
  wire is_table = opcode_q == OP_VEC_TABLE;
  wire is_drain = opcode_q == OP_VEC_DRAIN;
  wire is_softmax = HAS_ROWS && opcode_q == OP_VEC_SOFTMAX;
  wire is_norm = HAS_ROWS && opcode_q == OP_VEC_LAYER_NORM;
  wire is_rows = is_softmax || is_norm;

  // What is known of an item in the cycle after its last grant, and in the one after that.
  typedef struct packed {
    logic first;
    logic last;
    logic [$clog2(W)-1:0] a_offset;
    logic [$clog2(W)-1:0] b_offset;
    logic [5:0] entry;
    logic [6:0] v_register;
    logic signed [31:0] weight;
    logic chunk_first;
    logic pass_first;
    logic pass_last;
    logic [CHUNK_BITS-1:0] chunk;
  } item_t;
  item_t early_q;
  item_t late_q;
  logic early_valid_q;
  logic late_valid_q;
  logic a_arrives_q;
  logic b_arrives_q;
  logic [A_BITS-1:0] a_word_q;
  logic [B_BITS-1:0] b_word_q;
  always_ff @(posedge clk) begin
    early_valid_q <= item_done && !rst;
    late_valid_q  <= early_valid_q && !rst;
    a_arrives_q   <= a_take && !rst;
    b_arrives_q   <= b_take && opcode_q != OP_VEC_RESIZE && !rst;  // of that: entries of tables
    if (a_take) a_word_q <= a_word;
    if (b_take) b_word_q <= b_word;
    if (item_done)
      early_q <= '{first: item_first, last: complete, a_offset: a_offset, b_offset: b_offset,
                   entry: entry, v_register: v_register, weight: weight, chunk_first: chunk_first,
                   pass_first: pass_first, pass_last: pass_last, chunk: chunk};
    if (early_valid_q) late_q <= early_q;
  end

  // A drain's accumulators are read in the cycle of the grant, one before words arrive.
  wire at_once = !COLLECTED || is_drain;
  wire compute = at_once ? early_valid_q : late_valid_q;
  item_t item;
  assign item = at_once ? early_q : late_q;

  // Collectors. Words stay where they are until the first word of a later item comes.
  logic [WB-1:0] a_words_q[BLOCK_WORDS];
  logic [WB-1:0] b_words_q[B_WORDS];
  logic [N*32-1:0] m_q;
  always_ff @(posedge clk) begin
    if (a_arrives_q) a_words_q[a_word_q] <= a_data;
    if (b_arrives_q) b_words_q[b_word_q] <= b_data;
    if (complete && is_drain) m_q <= m_data;
  end

  logic [LANES*32-1:0] v_q[V_REGISTERS];
  logic [LANES*31-1:0] multipliers_q[ENTRIES];
  logic [LANES*6-1:0] shifts_q[ENTRIES];

  // Parameters and tables: a block goes to its registers as a whole.
  always_ff @(posedge clk) begin
    if (compute && (is_param || is_table)) begin
      automatic logic [BLOCK_WORDS*WB-1:0] words;
      automatic logic [BLOCK_BYTES*8-1:0] block;
      for (int unsigned i = 0; i < BLOCK_WORDS; i++) begin
        words[i*WB+:WB] = !COLLECTED && a_arrives_q && a_word_q == A_BITS'(i) ?
            a_data : a_words_q[i];
      end
      block = words[32'(item.a_offset)*8+:BLOCK_BYTES*8];
      if (is_param) v_q[V_BITS'(item.v_register)] <= block[0+:LANES*32];
      if (is_param && !bias_only_q) begin
        automatic logic [LANES*31-1:0] multipliers;
        automatic logic [LANES*6-1:0] shifts;
        for (int unsigned i = 0; i < LANES; i++) begin
          multipliers[i*31+:31] = block[(LANES+i)*32+:31];
          shifts[i*6+:6] = block[LANES*64+i*8+:6];
        end
        multipliers_q[place(item.entry, f_param_alias)] <= multipliers;
        shifts_q[place(item.entry, f_param_alias)] <= shifts;
      end
      if (is_table) begin
        automatic logic [TABLE_BITS-1:0] entries;
        entries = TABLE_BITS'(block[2047:0]);
        for (int unsigned i = 0; i < TABLE_REGISTERS; i++)
          v_q[V_BITS'(item.v_register)+V_BITS'(i)] <= entries[i*LANES*32+:LANES*32];
      end
    end
  end

  // Rows: the codes of a chunk, and what they have in common with the rest of their row.
  logic [15:0] reciprocal;
  logic [5:0] amount;
  logic [30:0] slope;
  logic signed [38:0] offset;
  logic [LANES-1:0][15:0] powers;
  if (HAS_ROWS) begin : g_rows
    logic [7:0] peak;
    logic [LANES-1:0][7:0] codes;
    wire take = compute && is_rows;
    /* verilator lint_off LATCH */  // variables of a block are no latches
    always_comb begin
      codes  = '0;
      powers = '0;
      if (take) begin
        automatic logic [LANE_WORDS*WB-1:0] flat;
        automatic logic [POWER_BITS-1:0] entries;
        for (int unsigned i = 0; i < LANE_WORDS; i++)
          flat[i*WB+:WB] = !COLLECTED && a_arrives_q && a_word_q == A_BITS'(i) ?
              a_data : a_words_q[i];
        codes = flat[32'(item.a_offset)*8+:LANES*8];
        if (is_softmax) begin
          for (int unsigned i = 0; i < POWER_REGISTERS; i++)
            entries[i*LANES*32+:LANES*32] = v_q[v_table_q+V_BITS'(i)];
          for (int unsigned i = 0; i < LANES; i++) begin
            automatic logic [7:0] below;
            below = peak - codes[i];
            powers[i] = entries[32'(below)*16+:16];
          end
        end
      end
    end
    /* verilator lint_on LATCH */
    tw_vec_rows #(
        .CHUNK_BITS(CHUNK_BITS)
    ) rows (
        .chunk_first(item.chunk_first), .pass_first(item.pass_first), .pass_last(item.pass_last),
        .elements(item.chunk), .*
    );
  end else begin : g_no_rows
    assign {reciprocal, amount, slope, offset, powers} = '0;
    /* verilator lint_off UNUSEDSIGNAL */
    wire unused = &{row_ready, item.chunk_first, item.pass_first, item.pass_last, item.chunk};
    /* verilator lint_on UNUSEDSIGNAL */
  end

  // The sum before the shift: an addend and a factor times the multiplier. Of results that are
  // codes or raw already: the addend alone.
  logic [LANES-1:0][63:0] sum;
  logic [LANES-1:0][7:0] peak;                   // pool: largest so far
  logic [LANES-1:0][7:0] peak_q;
  logic [LANES-1:0][FACTOR_BITS-1:0] around;     // resize: sum of neighbours so far
  logic [LANES-1:0][FACTOR_BITS-1:0] around_q;
  /* verilator lint_off LATCH */  // variables of a block are no latches
  /* verilator lint_off WIDTHCONCAT */  // as many zeros as that are meant
  always_comb begin
    sum = '0;
    around = '0;
    peak = '0;
    if (compute && !is_param && !is_table) begin
      automatic logic [LANE_WORDS*WB-1:0] a_flat;
      automatic logic [B_WORDS*WB-1:0] b_flat;
      automatic logic [LANES-1:0][7:0] a;
      automatic logic [LANES-1:0][7:0] b;
      automatic logic [LANES-1:0][30:0] multipliers;
      automatic logic [LANES-1:0][63:0] factors;  // of FACTOR_BITS, sign-extended
      for (int unsigned i = 0; i < LANE_WORDS; i++) begin
        a_flat[i*WB+:WB] = !COLLECTED && a_arrives_q && a_word_q == A_BITS'(i) ?
            a_data : a_words_q[i];
      end
      for (int unsigned i = 0; i < B_WORDS; i++) begin
        b_flat[i*WB+:WB] = !COLLECTED && b_arrives_q && b_word_q == B_BITS'(i) ?
            b_data : b_words_q[i];
      end
      a = a_flat[32'(item.a_offset)*8+:LANES*8];
      b = b_flat[32'(item.b_offset)*8+:LANES*8];
      multipliers = multipliers_q[place(item.entry, f_param_alias)];
      case (opcode_q)
        OP_VEC_DRAIN: begin
          automatic logic [LANES-1:0][31:0] biases;
          biases = v_q[V_BITS'(item.v_register)];
          for (int unsigned i = 0; i < LANES; i++) begin
            automatic logic signed [31:0] total;
            total = signed'(m_q[i*32+:32]) + signed'(biases[i]);
            factors[i] = 64'(total);
            if (raw_q) sum[i] = 64'(total);
          end
        end
        OP_VEC_ELTWISE: begin
          automatic logic signed [31:0] second;
          second = signed'({1'b0, multipliers[1]});
          if (op_q == 3'd1) second = -second;
          if (scalar_q) b = {LANES{b[0]}};
          for (int unsigned i = 0; i < LANES; i++) begin
            automatic logic signed [8:0] x;
            automatic logic signed [8:0] y;
            x = 9'(signed'(a[i])) - 9'(za_q);
            y = 9'(signed'(b[i])) - 9'(zb_q);
            factors[i] = op_q == 3'd2 ? 64'(x) * 64'(y) : 64'(x);
            case (op_q)
              3'd0, 3'd1: sum[i] = 64'(y) * 64'(second) + bias_q;
              3'd2: sum[i] = bias_q;
              3'd3: sum[i] = signed'(a[i]) > signed'(b[i]) ? 64'(a[i]) : 64'(b[i]);
              default: sum[i] = signed'(a[i]) < signed'(b[i]) ? 64'(a[i]) : 64'(b[i]);
            endcase
          end
        end
        OP_VEC_COPY:
        for (int unsigned i = 0; i < LANES; i++) begin
          factors[i] = 64'(signed'(a[i])) - 64'(za_q);
          sum[i] = as_is_q ? 64'(a[i]) : bias_q;
        end
        OP_VEC_POOL:
        for (int unsigned i = 0; i < LANES; i++) begin
          peak[i] = item.first || signed'(a[i]) > signed'(peak_q[i]) ? a[i] : peak_q[i];
          factors[i] = '0;
          sum[i] = 64'(peak[i]);
        end
        OP_VEC_SOFTMAX:
        for (int unsigned i = 0; i < LANES; i++) begin
          factors[i] = 64'(powers[i]);
          multipliers[i] = 31'(reciprocal);
          sum[i] = (64'd1 << amount) >> 1;
        end
        OP_VEC_LAYER_NORM: begin
          automatic logic [B_BYTES*8-1:0] block;
          block = b_flat[32'(item.b_offset)*8+:B_BYTES*8];
          for (int unsigned i = 0; i < LANES; i++) begin
            automatic logic signed [39:0] wide;
            automatic logic signed [24:0] z;
            automatic logic signed [15:0] gain;
            wide = 40'(signed'(a[i])) * 40'(signed'({1'b0, slope})) - 40'(offset);
            z = 25'(wide >>> amount);
            gain = block[(2*LANES+i)*16+:16];
            factors[i] = gain < 0 ? -64'(z) : 64'(z);
            multipliers[i] = 31'(unsigned'(gain < 0 ? -17'(gain) : 17'(gain)));
            sum[i] = 64'(signed'(block[i*32+:32]));
          end
        end
        default:  // resize
        for (int unsigned i = 0; i < LANES; i++) begin
          automatic logic signed [8:0] x;
          automatic logic signed [FACTOR_BITS-1:0] near;
          x = 9'(signed'(a[i])) - 9'(za_q);
          near = FACTOR_BITS'(x) * FACTOR_BITS'(signed'(item.weight));
          if (!item.first) near = near + signed'(around_q[i]);
          around[i] = near;
          factors[i] = 64'(near);
          sum[i] = bias_q;
        end
      endcase
      if (item.last && !as_is_q && !raw_q) begin
        if (!is_drain && !is_rows) multipliers = {LANES{multipliers[0]}};
        for (int unsigned i = 0; i < LANES; i++)
          sum[i] = signed'(sum[i]) +
              64'(signed'(factors[i][FACTOR_BITS-1:0])) * signed'({33'b0, multipliers[i]});
      end
    end
  end
  /* verilator lint_on WIDTHCONCAT */
  /* verilator lint_on LATCH */
  always_ff @(posedge clk) begin
    if (compute && opcode_q == OP_VEC_POOL) peak_q <= peak;
    if (compute && opcode_q == OP_VEC_RESIZE) around_q <= around;
  end

  // Shift, clamp, table.
  wire summed = compute && item.last && !is_param && !is_table;
  logic shift_valid;
  logic [LANES-1:0][63:0] shift_sum;
  logic [5:0] shift_entry;
  if (SUM_REGISTER) begin : g_sum
    logic valid_q;
    logic [LANES-1:0][63:0] sum_q;
    logic [5:0] entry_q;
    always_ff @(posedge clk) begin
      valid_q <= summed && !rst;
      if (summed) begin
        sum_q   <= sum;
        entry_q <= item.entry;
      end
    end
    assign shift_valid = valid_q;
    assign shift_sum   = sum_q;
    assign shift_entry = entry_q;
  end else begin : g_no_sum
    assign shift_valid = summed;
    assign shift_sum   = sum;
    assign shift_entry = item.entry;
  end

  assign push = shift_valid;
  /* verilator lint_off LATCH */  // variables of a block are no latches
  always_comb begin
    result = '0;
    if (shift_valid) begin
      automatic logic [LANES-1:0][7:0] codes;
      if (as_is_q) begin
        for (int unsigned i = 0; i < LANES; i++) codes[i] = shift_sum[i][7:0];
      end else begin
        automatic logic [LANES-1:0][5:0] shifts;
        shifts = shifts_q[place(shift_entry, f_param_alias)];
        if (!is_drain) shifts = {LANES{shifts[0]}};
        if (f_shift_high) shifts = shifts & {LANES{6'h1f}};
        if (is_rows) shifts = {LANES{is_softmax ? amount : 6'(norm_shift_q)}};
        for (int unsigned i = 0; i < LANES; i++)
          codes[i] = rescale(signed'(shift_sum[i]), shifts[i], zp_q, low_q, high_q, is_rows,
                             f_round_ties);
      end
      if (use_table_q) begin
        automatic logic [TABLE_BITS-1:0] entries;
        for (int unsigned i = 0; i < TABLE_REGISTERS; i++)
          entries[i*LANES*32+:LANES*32] = v_q[v_table_q+V_BITS'(i)];
        for (int unsigned i = 0; i < LANES; i++) begin
          automatic logic [7:0] index;
          index = codes[i] ^ 8'h80;
          if (f_table_last && index == 8'd255) index = 8'd254;
          codes[i] = entries[32'(index)*8+:8];
        end
      end
      if (raw_q) begin
        for (int unsigned i = 0; i < LANES; i++) result[i*32+:32] = shift_sum[i][31:0];
      end else begin
        result[0+:LANES*8] = codes;
      end
    end
  end
  /* verilator lint_on LATCH */
endmodule
